"""What a run has finished, on disk, so that a later run of the same plan can go on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from reshard.errors import OutputError, quoted, storage_errors
from reshard.source import FileStamp


@dataclass(frozen=True, slots=True)
class FinishedFile:
    """A file of the output, as it was when it was finished."""

    sha256: str | None
    stamp: FileStamp


class Journal:
    """The first line says what was begun, every other one that a file is finished.

    `finished` maps paths of the output to what is known of them.
    """

    def __init__(self, path: Path, finished: dict[str, FinishedFile]) -> None:
        self.finished = finished
        self._path = path
        self._lock = Lock()

    @classmethod
    def open(cls, path: Path, begun_as: Mapping[str, Any]) -> Journal:
        """Continue the journal at `path`, or begin one, for a run that `begun_as` identifies.

        Raises `OutputError` where it was begun as another run.
        """
        with storage_errors(path):
            plain = path.exists() and not path.is_symlink()
            content = path.read_bytes() if plain else b""
        head, finished, intact = _parse(content)
        if head is None:
            journal = cls(path, {})
            journal.remove()
            journal._append(begun_as)
            return journal
        for key, value in begun_as.items():
            if head.get(key) != value:
                raise OutputError(
                    f"{quoted(str(path.parent.parent))} was begun with another {key}: "
                    f"{_shown(head.get(key))}, now {_shown(value)}",
                    hint="finish it as it was begun, or choose another output directory "
                    "(or remove this one)",
                )
        with storage_errors(path):
            os.truncate(path, intact)
        return cls(path, finished)

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
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with storage_errors(self._path), open(os.open(self._path, flags, 0o666), "ab") as file:
            file.write(json.dumps(line).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())


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
        except (ValueError, KeyError, TypeError, AttributeError):
            break
        if not line.endswith(b"\n"):
            break
        intact += len(line)
    return (head if intact else None), finished, intact


def _shown(value: Any) -> str:
    return quoted(value if isinstance(value, str) else json.dumps(value))
