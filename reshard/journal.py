"""What a run has finished, on disk, so that a later run of the same plan can go on from there."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from reshard.errors import OutputError, quoted, storage_errors
from reshard.source import FileStamp


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file of the output, as it was when it was finished."""

    sha256: str | None
    stamp: FileStamp


class Journal:
    """The first line says what was begun, every other one that a file is finished.

    `finished` maps paths of the output to what is known of them; `continued`: there was a journal.
    """

    def __init__(self, path: Path, finished: dict[str, FinishedFile], *, continued: bool) -> None:
        self.finished = finished
        self.continued = continued
        self._path = path
        self._lock = Lock()

    @classmethod
    def open(
        cls, path: Path, begun_as: Mapping[str, Any], begun_from: str | None = None
    ) -> Journal:
        """Continue the journal at `path`, or begin one, for a run that `begun_as` identifies.

        Raises `OutputError` where it was begun as another run; the hint names its `begun_from`.
        """
        with storage_errors(path), open_own(path) as file:
            head, finished, intact = _parse(file.read())
        if head is None:
            journal = cls(path, {}, continued=False)
            journal.remove()
            journal._append({**begun_as, "from": begun_from} if begun_from else begun_as)
            return journal
        for key, value in begun_as.items():
            if head.get(key) != value:
                origin = head.get("from")
                before = f" (from {quoted(origin)})" if isinstance(origin, str) else ""
                raise OutputError(
                    f"{quoted(str(path.parent.parent))} was begun with another {key}: "
                    f"{_shown(head.get(key))}, now {_shown(value)}",
                    hint=f"finish it as it was begun{before}, or choose another output directory "
                    "(or remove this one)",
                )
        with storage_errors(path), open_own(path) as file:
            file.truncate(intact)
        return cls(path, finished, continued=True)

    def record(self, path: str, finished: FinishedFile) -> None:
        """Write down, durably, that the file `path` of the output is finished."""
        line = {"file": path, "sha256": finished.sha256, "stamp": list(finished.stamp)}
        with self._lock:
            self.finished[path] = finished
            self._append(line)

    def remove(self) -> None:
        """Remove the file of the journal."""
        with storage_errors(self._path):
            self._path.unlink(missing_ok=True)

    def _append(self, line: Mapping[str, Any]) -> None:
        with storage_errors(self._path), open_own(self._path) as file:
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(line).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())


def open_own(path: Path) -> BinaryIO:
    """Open a file of this tool for reading and writing, creating it.

    Raises `OutputError` for a link, a hard link or anything that is no plain file: it could be
    somebody else's.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o666)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return os.fdopen(descriptor, "r+b")
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise OutputError(
        f"{quoted(str(path))} is not a plain file of its own", hint="remove it, then try again"
    )


def _parse(content: bytes) -> tuple[dict[str, Any] | None, dict[str, FinishedFile], int]:
    """The first line, the finished files, and how many bytes of `content` are whole lines.

    A kill or a power failure may have torn the end: nothing from the first bad line on counts.
    """
    head: dict[str, Any] | None = None
    finished: dict[str, FinishedFile] = {}
    intact = 0
    for line in content.splitlines(keepends=True):
        try:
            entry = json.loads(line)
            if head is None:
                head = dict(entry.items())
            else:
                stamp = FileStamp(*entry["stamp"])
                finished[entry["file"]] = FinishedFile(entry["sha256"], stamp)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            break
        if not line.endswith(b"\n"):
            break
        intact += len(line)
    return (head if intact else None), finished, intact


def _shown(value: Any) -> str:
    return quoted(value if isinstance(value, str) else json.dumps(value))
