"""Getting files into an output from a far source: by ranges, several at a time, to be continued.

A file is put together in the directory that marks the output as unfinished. What of it is on disk
is noted there as well, so a later run asks for the rest only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from threading import Event, Lock
from typing import BinaryIO

from reshard.errors import BundleError, HubReplyError, quoted, storage_errors
from reshard.header import encode_header
from reshard.journal import open_own
from reshard.output import OutputDirectory, check_space
from reshard.progress import Progress, Silent
from reshard.ranges import Request, Segment, plan_requests, remaining, scatter
from reshard.source import LocalSource, Range, Source, sha256_of
from reshard.strict_json import digest
from reshard.tasks import FileTask, FinishedTask, Stopped, in_parallel, watched

_NOTED = 16 << 20
"""Bytes that a request may bring before they are noted as being on disk."""


def fetch_tasks(
    tasks: Sequence[FileTask],
    *,
    source: Source,
    output: OutputDirectory,
    jobs: int,
    checksums: bool,
    progress: Progress,
    label: str,
    more_bytes: int,
) -> list[FinishedTask]:
    """Bring files whose bytes lie elsewhere, stage by stage, `jobs` requests at a time.

    Raises `OutputError` where the disk has too little room for what is missing and `more_bytes`,
    `BundleError` where what came is not what a task's sha256 says; `HubError` and
    `StorageError` where fetching or writing fails. Then a later run continues.
    """
    partials = [PartialFile(task, source, output) for task in tasks]
    check_space(output.root, sum(partial.missing for partial in partials) + more_bytes)

    def bring(part: tuple[PartialFile, Request | None], stop: Event) -> FinishedTask | None:
        partial, request = part
        if request is not None:
            partial.bring(request, stop, progress)
        return partial.finish(output, checksums, stop, progress) if partial.is_last() else None

    stages: dict[int | None, list[PartialFile]] = {}
    for task, partial in zip(tasks, partials, strict=True):
        stages.setdefault(task.stage, []).append(partial)
    finished = []
    try:
        for stage, of_stage in stages.items():
            what = label if stage is None else f"stage {stage}"
            progress.start(what, sum(partial.missing for partial in of_stage))
            parts = [(partial, part) for partial in of_stage for part in partial.parts()]
            finished += [done for done in in_parallel(bring, parts, jobs) if done is not None]
    except HubReplyError:
        for partial in partials:
            partial.distrust()
        raise
    finally:
        for partial in partials:
            partial.close()
    return finished


class PartialFile:
    """One file of an output while its bytes arrive.

    `requests` bring what is missing, `missing` bytes in all.
    """

    def __init__(self, task: FileTask, source: Source, output: OutputDirectory) -> None:
        self._task = task
        self._source = source
        self._final = output.root / task.path
        self._path = output.partial(task.name)
        self._notes = output.partial(f"{task.name}.ranges")
        self._lock = Lock()
        self._file: BinaryIO | None = None
        self._trusted = True
        self._header, segments = layout(task)
        self._identity = _identity(task, self._header, segments, source)
        self.requests = plan_requests(remaining(segments, self._on_disk()))
        self.missing = sum(request.end - request.begin for request in self.requests)
        self._parts_left = len(self.parts())

    def bring(self, request: Request, stop: Event, progress: Progress) -> None:
        """Write what one request brings, and note it."""
        arrived = noted = request.begin

        def pieces() -> Iterator[bytes | memoryview]:
            nonlocal arrived, noted
            wanted = Range(request.file, request.begin, request.end)
            for piece in self._source.fetch(wanted, stop):
                if stop.is_set():
                    raise Stopped
                yield piece
                # Resumed for the next piece: this one is written.
                arrived += len(piece)
                progress.advance(len(piece))
                if arrived - noted >= _NOTED:
                    self._note(request.file, noted, arrived)
                    noted = arrived

        descriptor = self._open()
        try:
            for offset, data in scatter(request, pieces()):
                with storage_errors(self._final):
                    _write_at(descriptor, data, offset)
        except HubReplyError:
            self.distrust()
            raise
        finally:
            if arrived > noted:
                self._note(request.file, noted, arrived)

    def parts(self) -> Sequence[Request | None]:
        """What is to be done: the requests; where nothing is missing, just the end."""
        return self.requests or (None,)

    def is_last(self) -> bool:
        """Called for each part that is done: whether it was the last one."""
        with self._lock:
            self._parts_left -= 1
            return not self._parts_left

    def finish(
        self, output: OutputDirectory, checksums: bool, stop: Event, progress: Progress
    ) -> FinishedTask:
        """Check the whole file and give it its name."""
        task, descriptor = self._task, self._open()
        sha256 = None
        if checksums or task.sha256 is not None:
            whole = Range(self._path.name, 0, task.size)
            pieces = LocalSource(self._path.parent).read_many([whole])
            sha256 = sha256_of(watched(pieces, stop, Silent()))
        if task.sha256 not in (None, sha256):
            self._remove()
            raise BundleError(
                f"{quoted(task.path)}: its sha256 is {sha256} as it arrived, {task.sha256} was "
                "announced",
                hint="run the same command again: the file is fetched anew",
            )
        with storage_errors(self._final):
            os.fsync(descriptor)
            output.adopt(self._path, task.path)
        self._remove()
        output.record(task.path, sha256)
        progress.finish_file(task.path, "fetched")
        return FinishedTask(task.path, "fetched", sha256)

    def distrust(self) -> None:
        """Note nothing more of it, and forget what was noted: a later run begins it anew."""
        with self._lock, storage_errors(self._final):
            self._trusted = False
            self._notes.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> int:
        """The descriptor of the file, begun with its header where nothing of it is there."""
        with self._lock, storage_errors(self._final):
            if self._file is None:
                file = open_own(self._path)
                if os.fstat(file.fileno()).st_size != self._task.size:
                    os.truncate(file.fileno(), self._task.size)
                    _write_at(file.fileno(), memoryview(self._header), 0)
                self._file = file
            return self._file.fileno()

    def _on_disk(self) -> dict[str, list[tuple[int, int]]]:
        """The ranges of source files whose wanted bytes are here; nothing of another run counts."""
        with storage_errors(self._final):
            raw = b""
            both = os.path.lexists(self._path) and os.path.lexists(self._notes)
            if both and os.lstat(self._path).st_size == self._task.size:
                with open_own(self._notes) as notes:
                    raw = notes.read()
            first, *lines = raw.splitlines(keepends=True) or [b""]
            if first != f"{self._identity}\n".encode():
                self._remove()
                return {}
            found: dict[str, list[tuple[int, int]]] = {}
            intact = len(first)
            for line in lines:
                try:
                    file, begin, end = json.loads(line)
                    noted = int(begin), int(end)
                except (ValueError, TypeError, OverflowError):
                    break
                if not line.endswith(b"\n"):
                    break
                found.setdefault(file, []).append(noted)
                intact += len(line)
            with open_own(self._notes) as notes:  # what a power failure has torn, goes
                notes.truncate(intact)
        return found

    def _note(self, file: str, begin: int, end: int) -> None:
        """Note, durably, that the wanted bytes of a range are written."""
        with self._lock, storage_errors(self._final):
            if self._file is None or not self._trusted:
                return
            os.fdatasync(self._file.fileno())
            with open_own(self._notes) as notes:
                if not notes.seek(0, os.SEEK_END):
                    notes.write(f"{self._identity}\n".encode())
                notes.write(json.dumps([file, begin, end]).encode() + b"\n")
                notes.flush()
                os.fsync(notes.fileno())

    def _remove(self) -> None:
        """Drop the file and its notes."""
        self.close()
        with storage_errors(self._final):
            self._path.unlink(missing_ok=True)
            self._notes.unlink(missing_ok=True)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset, data = offset + written, data[written:]


def layout(task: FileTask) -> tuple[bytes, list[Segment]]:
    """The header of a file, and where its other bytes come from."""
    if task.whole is not None:
        return b"", [Segment(task.whole, 0, task.size, 0)]
    header = encode_header(task.tensors)
    segments = []
    position = len(header)
    for tensor in task.tensors:
        segments.append(Segment(tensor.file, tensor.begin, tensor.end, position))
        position += tensor.nbytes
    return header, segments


def _identity(task: FileTask, header: bytes, segments: list[Segment], source: Source) -> str:
    """Equal for equal bytes only: what must agree for a later run to go on with a file."""
    if task.whole is not None and task.sha256 is not None:
        return task.sha256
    parts = [[s.file, s.begin, s.end] for s in segments]
    return digest([dict(source.origin), task.size, hashlib.sha256(header).hexdigest(), parts])
