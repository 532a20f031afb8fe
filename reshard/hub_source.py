"""A repository on the Hub as the source of a checkpoint: bytes are fetched by ranges, as needed."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING

from reshard.errors import (
    CheckpointError,
    HeaderError,
    HubError,
    HubUnreachableError,
    quoted,
    storage_errors,
)
from reshard.header import header_size
from reshard.ranges import Segment, plan_requests, scatter
from reshard.reference import HubReference
from reshard.source import (
    CHUNK,
    STAGE_DIRECTORY,
    FileStamp,
    LocalSource,
    Range,
    Source,
    is_plain_name,
)
from reshard.tasks import MAX_JOBS, in_parallel

if TYPE_CHECKING:
    from reshard.hub import HubFile, Repository

_FIRST_READ = 16 << 10
"""Bytes of a weight file that are fetched to see its header: mostly all of it."""

_LARGE_HEADER = 4 << 20
"""Headers above this size, ten times what releases have, are not kept for all files at a time."""

_KEPT = 64_000_000
"""Files of up to this many bytes that are no weights are fetched once and kept."""

_log = logging.getLogger("reshard")


def open_hub(reference: HubReference) -> Source:
    """The repository at the commit that its revision names now, which is used from then on.

    Where the Hub cannot be reached, the local cache serves. Raises `HubError`.
    """
    hub = load_hub()
    try:
        repository = hub.Repository.pin(reference)
        return HubSource(repository, repository.files())
    except HubUnreachableError as error:
        cached = hub.cached_snapshot(reference)
        if cached is None:
            message = f"{error.message}, and the cache does not have it"
            raise HubUnreachableError(message, hint=error.hint) from None
        snapshot, complete = cached
        lacking = "" if complete else ", which does not have all of it"
        _log.warning("%s; taking %s from the cache%s", error.message, snapshot, lacking)
        return LocalSource(snapshot)


def load_hub() -> ModuleType:
    """The module `reshard.hub`: late, because importing the library takes longer than planning.

    Raises `HubError` where the library cannot be imported, as with variables that are no numbers.
    """
    try:
        from reshard import hub
    except (ValueError, ImportError) as error:
        raise HubError(
            f"huggingface_hub cannot be used: {quoted(str(error))}",
            hint="check the variables HF_*, and the installation",
        ) from error
    return hub


class HubSource:
    """A repository at one commit.

    Files that the library's cache holds are read from there. The others are read by requests for
    exactly the bytes wanted, so nothing is ever stored but the output.
    """

    def __init__(self, repository: Repository, files: Mapping[str, HubFile]) -> None:
        self._repository = repository
        self._listing: dict[str, HubFile] = {}
        directories = set()
        for path, file in files.items():
            directory, slash, name = path.partition("/")
            directories |= {directory} if slash else set()
            if not slash or (STAGE_DIRECTORY.fullmatch(directory) and is_plain_name(name)):
                self._listing[path] = file
        self._files = tuple(sorted(path for path in self._listing if "/" not in path))
        self._directories = tuple(sorted(directories))
        self._cached: dict[str, Path | None] = {}
        self._near: dict[Path, LocalSource] = {}
        self._headers: dict[str, bytes] = {}
        self._small: dict[str, bytes] = {}

    @property
    def origin(self) -> Mapping[str, str]:
        return {"repo": self._repository.reference.repo, "commit": self._repository.commit}

    @property
    def name(self) -> str:
        return str(self._repository.reference.at(self._repository.commit))

    def files(self) -> Sequence[str]:
        return self._files

    def directories(self) -> Sequence[str]:
        return self._directories

    def stamp(self, file: str) -> FileStamp:
        near = self._near_source(file)
        if near is not None:
            return near[0].stamp(near[1])
        return FileStamp(self._entry(file).size, 0, 0)

    def read(self, file: str, begin: int, end: int) -> bytes:
        return b"".join(bytes(piece) for piece in self.read_many([Range(file, begin, end)]))

    def read_many(self, ranges: Iterable[Range], stop: Event | None = None) -> Iterator[memoryview]:
        return _in_chunks(self._pieces(ranges, stop or Event()))

    def fetch(self, wanted: Range, stop: Event) -> Iterator[bytes | memoryview]:
        """The bytes of one range, in pieces of any length, by one request while nothing fails."""
        file, begin, end = wanted
        near = self._near_source(file)
        entry = self._entry(file)
        if near is not None:
            yield from near[0].read_many([Range(near[1], begin, end)])
        elif self._is_small(file):
            yield self._whole(file)[begin:end]
        else:
            held = self._headers.get(file, b"")[begin:end]
            if held:
                yield held
            if begin + len(held) < end:
                yield from self._repository.stream(file, begin + len(held), end, entry.size, stop)

    def holds(self, path: str, size: int | None = None) -> bool:
        return path in self._listing and size in (None, self._listing[path].size)

    def local_path(self, file: str) -> Path | None:
        """Where the cache has the file, in the size that the repository lists."""
        if file not in self._listing:
            return None
        if file not in self._cached:
            found = self._repository.cached(file)
            if found is not None:
                with storage_errors(found):
                    found = found if found.stat().st_size == self._entry(file).size else None
            self._cached[file] = found
        return self._cached[file]

    def prefetch_headers(self, files: Sequence[str]) -> None:
        far = [
            file
            for file in files
            if file in self._listing
            and file not in self._headers
            and not self._is_small(file)
            and self.local_path(file) is None
        ]
        self._headers |= dict(in_parallel(self._read_header, far, MAX_JOBS))

    def published_sha256(self, file: str) -> str | None:
        return self._entry(file).sha256

    def _entry(self, file: str) -> HubFile:
        try:
            return self._listing[file]
        except KeyError:
            raise CheckpointError(f"{quoted(file)}: no such file in {self.name}") from None

    def _near_source(self, file: str) -> tuple[LocalSource, str] | None:
        """The directory of the cache that has a file, as a source, and the name there."""
        path = self.local_path(file)
        if path is None:
            return None
        if path.parent not in self._near:
            self._near[path.parent] = LocalSource(path.parent)
        return self._near[path.parent], path.name

    def _pieces(self, ranges: Iterable[Range], stop: Event) -> Iterator[memoryview]:
        for run in _ascending(ranges):
            for request in plan_requests(Segment(*wanted, at=0) for wanted in run):
                pieces = self.fetch(Range(request.file, request.begin, request.end), stop)
                for _, piece in scatter(request, pieces):
                    yield piece

    def _read_header(self, file: str, stop: Event) -> tuple[str, bytes]:
        """The file, and its first bytes: its header, unless that is very large."""
        size = self._entry(file).size
        start = b"".join(self._repository.stream(file, 0, min(size, _FIRST_READ), size, stop))
        try:
            length = header_size(file, start, size)
        except HeaderError:  # whoever reads the header will say so
            return file, start
        if length > _LARGE_HEADER:
            return file, start
        rest = self._repository.stream(file, len(start), max(length, len(start)), size, stop)
        return file, start + b"".join(rest)

    def _is_small(self, file: str) -> bool:
        size, sha256, _ = self._entry(file)
        return size <= _KEPT and (sha256 is None or not file.endswith(".safetensors"))

    def _whole(self, file: str) -> bytes:
        """A small file, checked: side files are asked for once for each directory written."""
        if file not in self._small:
            size, sha256, blob_id = self._entry(file)
            content = self._repository.whole(file, size)
            if sha256 is not None:
                matches = hashlib.sha256(content).hexdigest() == sha256
            else:
                matches = blob_sha1(content) == blob_id
            if len(content) != size or not matches:
                raise HubError(
                    f"{self.name}: {quoted(file)}: what came is not the file "
                    "that the repository lists",
                    hint="run the same command again",
                )
            self._small[file] = content
        return self._small[file]


def blob_sha1(content: bytes) -> str:
    """The name that git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _ascending(ranges: Iterable[Range]) -> Iterator[list[Range]]:
    """Ranges in their order, cut into runs of one file and growing offsets."""
    run: list[Range] = []
    for wanted in ranges:
        if run and (wanted.file != run[-1].file or wanted.begin < run[-1].end):
            yield run
            run = []
        run.append(wanted)
    if run:
        yield run


def _in_chunks(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces of `CHUNK`, the last one shorter."""
    buffer = memoryview(bytearray(CHUNK))
    filled = 0
    for piece in pieces:
        while piece:
            taken = min(len(piece), CHUNK - filled)
            buffer[filled : filled + taken] = piece[:taken]
            filled += taken
            piece = piece[taken:]
            if filled == CHUNK:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]
