"""What a run has to bring into its output, file by file, and doing many of them at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TypeVar

from reshard.header import TensorInfo
from reshard.progress import Progress
from reshard.source import FileStamp, Source

MAX_JOBS = 8
"""More threads, or requests to another machine, at a time bring nothing."""

_T = TypeVar("_T")
_R = TypeVar("_R")


class Stopped(Exception):
    """Another file failed, or the user interrupted: this one ends quietly."""


@dataclass(frozen=True, slots=True)
class FileTask:
    """One file to bring into an output.

    It is new and canonical, with `tensors` in their order; or has the same bytes as the existing
    file `same_as`; or as the file `whole` of a source that is elsewhere. `sha256` is its checksum,
    and `stamp` what `same_as` must be still, where that is known. `linkable`: `same_as` is ours to share. `stage` is the one that it is brought for, if any.
    """

    path: str
    size: int
    tensors: tuple[TensorInfo, ...] = ()
    same_as: Path | None = None
    whole: str | None = None
    sha256: str | None = None
    stamp: FileStamp | None = None
    linkable: bool = True
    stage: int | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def is_far(self, source: Source) -> bool:
        """Whether bytes of it have to come from another machine."""
        return self.whole is not None or any(
            source.local_path(file) is None for file in {t.file for t in self.tensors}
        )


@dataclass(frozen=True, slots=True)
class FinishedTask:
    """A file that is in place. `how`: written, fetched, linked, reflinked, copied or reused."""

    path: str
    how: str
    sha256: str | None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def default_jobs() -> int:
    """The cores that this process may use, at most `MAX_JOBS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, MAX_JOBS)


def in_parallel(work: Callable[[_T, Event], _R], items: Iterable[_T], jobs: int) -> Iterator[_R]:
    """Results of `work` on each item, `jobs` threads at a time, as they come.

    When one raises, or the caller is interrupted, the event is set and the rest is given up.
    """
    stop = Event()
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def watched(pieces: Iterable[memoryview], stop: Event, progress: Progress) -> Iterator[memoryview]:
    """The pieces, reported to `progress`, until `stop` is set."""
    for piece in pieces:
        if stop.is_set():
            raise Stopped
        yield piece
        progress.advance(len(piece))
