"""Getting files into an output: linked where the same bytes exist, else copied range by range."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from threading import Event

from reshard.bundle import BundleSet
from reshard.errors import (
    BundleError,
    ReshardError,
    SourceChangedError,
    StorageError,
    quoted,
    storage_errors,
)
from reshard.fetch import fetch_tasks
from reshard.header import TensorInfo, encode_header
from reshard.output import OutputDirectory, check_space
from reshard.progress import Progress
from reshard.source import FileStamp, LocalSource, Range, Source, sha256_of
from reshard.tasks import (
    MAX_JOBS,
    FileTask,
    FinishedTask,
    Stopped,
    default_jobs,
    in_parallel,
    watched,
)

_WRITEBACK = 8 << 20
"""Bytes of a file after which the disk is told to start writing; see docs/benchmarks.md."""

_FICLONE = 0x40049409  # linux/fs.h: share a whole file's blocks (btrfs, XFS)
_NO_LINK = (
    errno.EXDEV,
    errno.EPERM,
    errno.EMLINK,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.ENOTTY,
    errno.EINVAL,
)


def bundle_task(bundle: BundleSet, name: str, path: str) -> FileTask:
    """Bring a file of a set, by name, to `path`.

    Where it lies on this machine, size and header are checked first; else it is checked as it
    arrives. Raises `BundleError` where it is not what the manifest says.
    """
    record, there = bundle.manifest.files()[name], bundle.locate()[name]
    source = bundle.source
    existing = source.local_path(there)
    if existing is None:
        sha256 = bundle.announced_sha256(there, record)
        return FileTask(path, record.bytes, whole=there, sha256=sha256)
    bundle.header(there, record)
    stamp = source.stamp(there)
    return FileTask(
        path,
        record.bytes,
        same_as=existing,
        sha256=record.sha256,
        stamp=stamp,
        linkable="commit" not in source.origin,  # a cache is not ours, and nobody has checked it
    )


def run_tasks(
    tasks: Sequence[FileTask],
    *,
    source: Source,
    output: OutputDirectory,
    jobs: int | None,
    checksums: bool,
    progress: Progress,
    label: str,
    more_bytes: int = 0,
) -> list[FinishedTask]:
    """Bring files into an output, `jobs` at a time.

    jobs: by default the cores, at most `MAX_JOBS`, and `MAX_JOBS` requests to another machine.
    Raises `OutputError` where the disk has too little room for what cannot be linked and for
    `more_bytes`, which the caller will write afterwards. Where one file fails, the others stop, and
    what is finished stays for a later run.
    """
    finished = []
    near: list[FileTask] = []
    far: list[FileTask] = []
    for task in tasks:
        reused = output.reusable(task.path, task.size, checksum=checksums)
        if reused is None:
            (far if task.is_far(source) else near).append(task)
        else:
            finished.append(FinishedTask(task.path, "reused", reused.sha256))
            progress.finish_file(task.path, "reused")
    near.sort(key=lambda task: (-task.size, task.path))  # the largest first
    to_copy = sum(task.size for task in near if not _may_link(task, output.root))
    check_space(output.root, to_copy + more_bytes)
    if near:
        progress.start(label, to_copy)

    def bring(task: FileTask, stop: Event) -> FinishedTask:
        done = _bring(task, source, output, checksums, stop, progress)
        output.record(task.path, done.sha256)
        progress.finish_file(task.path, done.how)
        return done

    finished += in_parallel(bring, near, jobs or default_jobs())
    if far:
        finished += fetch_tasks(
            far,
            source=source,
            output=output,
            jobs=jobs or MAX_JOBS,
            checksums=checksums,
            progress=progress,
            label=label,
            more_bytes=more_bytes,
        )
    return finished


def tensor_ranges(tensors: Iterable[TensorInfo]) -> list[Range]:
    """Where the data of `tensors` lies, neighbours in one file merged."""
    ranges: list[Range] = []
    for tensor in tensors:
        last = ranges[-1] if ranges else None
        if last is not None and (last.file, last.end) == (tensor.file, tensor.begin):
            ranges[-1] = last._replace(end=tensor.end)
        elif tensor.nbytes:
            ranges.append(Range(tensor.file, tensor.begin, tensor.end))
    return ranges


def _may_link(task: FileTask, root: Path) -> bool:
    if task.same_as is None or not task.linkable:
        return False
    with storage_errors(task.same_as):
        return os.stat(task.same_as).st_dev == os.stat(root).st_dev


def _bring(
    task: FileTask,
    source: Source,
    output: OutputDirectory,
    checksums: bool,
    stop: Event,
    progress: Progress,
) -> FinishedTask:
    if stop.is_set():
        raise Stopped
    if task.same_as is None:
        header = memoryview(encode_header(task.tensors))
        data = source.read_many(tensor_ranges(task.tensors))
        pieces = watched(chain([header], data), stop, progress)
        sha256 = write_pieces(task.path, pieces, output, checksums)
        return FinishedTask(task.path, "written", sha256)
    return _take(task, task.same_as, output, checksums, stop, progress)


def _take(
    task: FileTask,
    existing: Path,
    output: OutputDirectory,
    checksums: bool,
    stop: Event,
    progress: Progress,
) -> FinishedTask:
    """Bring in a file whose bytes exist: linked, or copied and compared with its checksum."""
    how = _link(existing, task, output) if task.linkable else None
    whole = Range(existing.name, 0, task.size)
    stamps = {existing.name: task.stamp} if task.stamp else {}
    pieces = watched(LocalSource(existing.parent, stamps).read_many([whole]), stop, progress)
    sha256 = task.sha256
    if how is not None:
        if checksums and sha256 is None:
            sha256 = sha256_of(pieces)
        return FinishedTask(task.path, how, sha256)
    wrong = BundleError(
        f"{quoted(str(existing))}: its sha256 is not {sha256}, as the manifest says",
        hint="the file is damaged; fetch or split it again",
    )
    expected = (sha256, wrong) if sha256 is not None else None
    return FinishedTask(
        task.path, "copied", write_pieces(task.path, pieces, output, checksums, expected)
    )


def write_pieces(
    path: str,
    pieces: Iterable[memoryview],
    output: OutputDirectory,
    checksum: bool,
    expected: tuple[str, ReshardError] | None = None,
) -> str | None:
    """Write a new file, durably; its sha256 is that of the bytes as they were copied.

    `expected`: what the sha256 must be, and what to raise otherwise, before the file has its name.
    """
    digest = hashlib.sha256() if checksum or expected is not None else None
    with output.create(path) as temporary:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666)
        try:
            written = begun = 0
            for piece in pieces:
                rest = piece
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                written += len(piece)
                if written - begun >= _WRITEBACK:
                    _begin_writeback(descriptor, begun, written)
                    begun = written
                if digest is not None:  # while the disk is busy
                    digest.update(piece)
            if expected is not None and digest is not None and digest.hexdigest() != expected[0]:
                raise expected[1]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return digest.hexdigest() if digest else None


def _begin_writeback(descriptor: int, begin: int, end: int) -> None:
    """Have the disk start on these bytes of a file, without waiting: what this advice does on Linux.

    Left alone, the kernel keeps them in memory until fsync has to wait for all of them at once.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)


def _link(existing: Path, task: FileTask, output: OutputDirectory) -> str | None:
    """Hard-link a file, or share its blocks; None where the file system can do neither."""
    for how, make in (("linked", _hard_link), ("reflinked", _reflink)):
        try:
            with output.create(task.path) as temporary:
                make(existing, temporary)
                status = os.stat(temporary if how == "linked" else existing)
                if task.stamp not in (None, FileStamp.of(status)):
                    raise SourceChangedError(
                        f"{quoted(str(existing))} changed since it was planned",
                        hint="wait until nothing writes to the set, then run the command again",
                    )
            return how
        except StorageError as error:
            if error.errno not in _NO_LINK:
                raise
    return None


def _hard_link(existing: Path, new: Path) -> None:
    if existing.is_symlink():  # a Hub cache: its blobs are not ours to share
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    os.link(existing, new)


def _reflink(existing: Path, new: Path) -> None:
    with open(existing, "rb") as old, open(new, "xb") as file:
        fcntl.ioctl(file, _FICLONE, old.fileno())
        os.fsync(file.fileno())
