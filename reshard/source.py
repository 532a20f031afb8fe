"""Where a checkpoint's bytes come from: the protocol, and the local directory.

Nothing here writes. A source is read by name, below its root only.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import NamedTuple, Protocol

from reshard.errors import (
    CheckpointError,
    ReshardError,
    SourceChangedError,
    quoted,
    storage_errors,
)
from reshard.header import PROBE, SafetensorsHeader, header_size, parse_header

CHUNK = 1 << 20
"""Bytes moved at a time: measured best, and all the memory that a copy needs."""

MAX_JSON = 500_000_000
"""The largest config, index or manifest that is read; the largest known index has 30 MB."""

_SAMPLES = 16
_SAMPLE_BYTES = 4096
_SAMPLE_ALL_BELOW = 65536

STAGE_DIRECTORY = re.compile(r"stage-[0-9]{2,}-of-[0-9]{2,}")
"""The directories of a set, see `bundle.stage_directory`."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".msgpack", ".h5")
"""How the names of files end that hold weights, of whatever format."""

SHA256 = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")


class Range(NamedTuple):
    """The bytes `begin` to `end` of a file of a source."""

    file: str
    begin: int
    end: int


class FileStamp(NamedTuple):
    """What changes when a file's content is replaced."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class Source(Protocol):
    """What reshard asks of the place where a checkpoint lies."""

    @property
    def name(self) -> str:
        """The place, to be shown: a path, or a repository and its commit."""

    @property
    def origin(self) -> Mapping[str, str]:
        """What the manifest records: `directory`, or `repo` and `commit`."""

    def files(self) -> Sequence[str]:
        """Names of the files at the top level, sorted."""

    def directories(self) -> Sequence[str]:
        """Names of the directories at the top level, sorted."""

    def stamp(self, file: str) -> FileStamp:
        """The file as it was when it was first asked for."""

    def read(self, file: str, begin: int, end: int) -> bytes:
        """Exactly the bytes `begin` to `end`."""

    def read_many(self, ranges: Iterable[Range], stop: Event | None = None) -> Iterator[memoryview]:
        """The bytes of all ranges, one after the other, in pieces of `CHUNK` bytes.

        The last piece may be shorter. A piece is valid until the next one is asked for. `stop`: as
        for `fetch`.
        """

    def fetch(self, wanted: Range, stop: Event) -> Iterator[bytes | memoryview]:
        """The bytes of one range, in pieces of any length: one request where the source is far.

        When `stop` is set, it does not wait for anything any more, but fails.
        """

    def holds(self, path: str, size: int | None = None) -> bool:
        """Whether a file is there, and of this size; nothing is read."""

    def local_path(self, file: str) -> Path | None:
        """Where a file lies on this machine; None where reading it is a transfer."""

    def prefetch_headers(self, files: Sequence[str]) -> None:
        """The headers of these files are read next; a far source fetches them all at once."""

    def published_sha256(self, file: str) -> str | None:
        """The checksum that the publisher gave for a file, where it is on record."""


class LocalSource:
    """A directory: a checkpoint, a Hugging Face cache snapshot, or an output of reshard.

    Links are followed when they end at regular files. A file that changes between its first use
    and any later one raises `SourceChangedError`.
    """

    def __init__(self, root: Path, stamps: Mapping[str, FileStamp] = MappingProxyType({})) -> None:
        """`stamps`: files that were seen before, and must still be as they were."""
        self.root = root
        with storage_errors(root):
            if not root.is_dir():
                hint = "give the directory of a checkpoint, or org/name of one on the Hub"
                raise missing_directory(root, CheckpointError, hint=hint)
            entries = sorted(os.scandir(root), key=lambda entry: entry.name)
            kinds = {entry.name: entry.is_dir() for entry in entries}
        self._directories = tuple(name for name, is_directory in kinds.items() if is_directory)
        self._files = tuple(name for name, is_directory in kinds.items() if not is_directory)
        self._stamps = dict(stamps)

    @property
    def name(self) -> str:
        return quoted(str(self.root))

    @property
    def origin(self) -> Mapping[str, str]:
        root = self.root.resolve()
        cache = root.parent.parent.name
        kind, *repo = cache.split("--")
        snapshot = root.parent.name == "snapshots" and COMMIT.fullmatch(root.name)
        if snapshot and kind == "models" and len(repo) in (1, 2):
            return {"repo": "/".join(repo), "commit": root.name}
        return {"directory": os.fsencode(root.name).decode("utf-8", "replace")}

    def files(self) -> Sequence[str]:
        return self._files

    def directories(self) -> Sequence[str]:
        return self._directories

    def stamp(self, file: str) -> FileStamp:
        if file not in self._stamps:
            os.close(self._open(file))
        return self._stamps[file]

    def read(self, file: str, begin: int, end: int) -> bytes:
        return b"".join(bytes(piece) for piece in self.read_many([Range(file, begin, end)]))

    def read_many(self, ranges: Iterable[Range], stop: Event | None = None) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(CHUNK))
        filled = 0
        descriptors: dict[str, int] = {}
        try:
            for file, begin, end in ranges:
                if file not in descriptors:
                    descriptors[file] = self._open(file)
                position = begin
                while position < end:
                    room = buffer[filled : filled + min(CHUNK - filled, end - position)]
                    with storage_errors(self.root / file):
                        count = os.preadv(descriptors[file], [room], position)
                    if count == 0:
                        raise self._changed(file)
                    filled += count
                    position += count
                    if filled == CHUNK:
                        yield buffer
                        filled = 0
            if filled:
                yield buffer[:filled]
            for file, descriptor in descriptors.items():
                self._check_unchanged(file, os.fstat(descriptor))
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    @contextmanager
    def opened(self, file: str) -> Iterator[int]:
        """A descriptor to read or map a file by, which must not change meanwhile."""
        descriptor = self._open(file)
        try:
            yield descriptor
            self._check_unchanged(file, os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def read_into(self, buffer: memoryview, descriptor: int, file: str, begin: int) -> None:
        """Fill `buffer` with the bytes from `begin` on of a file that is `opened`."""
        filled = 0
        while filled < len(buffer):
            with storage_errors(self.root / file):
                count = os.preadv(descriptor, [buffer[filled:]], begin + filled)
            if count == 0:
                raise self._changed(file)
            filled += count

    def fetch(self, wanted: Range, stop: Event) -> Iterator[bytes | memoryview]:
        return self.read_many([wanted])

    def holds(self, path: str, size: int | None = None) -> bool:
        file = self.root / path
        with storage_errors(file):
            return file.is_file() and size in (None, file.stat().st_size)

    def local_path(self, file: str) -> Path | None:
        return self.root / file

    def prefetch_headers(self, files: Sequence[str]) -> None: ...

    def published_sha256(self, file: str) -> str | None:
        """In a Hugging Face cache, a weight file is a link to a blob named by its sha256."""
        blob = (self.root / file).resolve()
        named = blob.parent.name == "blobs" and SHA256.fullmatch(blob.name)
        return blob.name if named else None

    def _open(self, file: str) -> int:
        """A descriptor of a regular file that is the one first seen under this name."""
        path = self.root / file
        what = quoted(file)
        with storage_errors(path):
            try:
                status = os.stat(path)
            except FileNotFoundError:
                if path.is_symlink():
                    raise CheckpointError(
                        f"{what} is a broken link",
                        hint=f"its target {quoted(os.readlink(path))} is missing; "
                        "download the checkpoint again",
                    ) from None
                raise CheckpointError(f"{what}: no such file in {quoted(str(self.root))}") from None
            # Before opening: opening a FIFO blocks.
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{what} is not a regular file")
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check_unchanged(file, os.fstat(descriptor))
        except ReshardError:
            os.close(descriptor)
            raise
        return descriptor

    def _check_unchanged(self, file: str, status: os.stat_result) -> None:
        if self._stamps.setdefault(file, FileStamp.of(status)) != FileStamp.of(status):
            raise self._changed(file)

    def _changed(self, file: str) -> SourceChangedError:
        return SourceChangedError(
            f"{quoted(str(self.root / file))} changed while it was being read",
            hint="wait until nothing writes to the source, then start with a new output directory",
        )


def missing_directory(
    path: Path, error: type[ReshardError], *, hint: str | None = None
) -> ReshardError:
    """The error for a path that should be a directory."""
    what = quoted(str(path))
    if path.exists():
        hint = f"give the directory: {quoted(str(path.parent))}"
        return error(f"{what} is not a directory", hint=hint)
    return error(f"{what}: no such directory", hint=hint)


def read_header(source: Source, file: str) -> SafetensorsHeader:
    """Read and check the header of one file. Raises `HeaderError`; see `header.parse_header`."""
    size = source.stamp(file).size
    start = source.read(file, 0, min(size, PROBE))
    length = header_size(file, start, size)
    raw = start[:length] + source.read(file, len(start), max(length, len(start)))
    return parse_header(file, raw, size)


def read_json(source: Source, file: str, error: type[ReshardError]) -> bytes:
    """The content of a JSON file. Raises `error` for one of more than `MAX_JSON` bytes."""
    size = source.stamp(file).size
    if size > MAX_JSON:
        raise error(f"{quoted(file)}: {size:,} bytes, more than the {MAX_JSON:,} that are read")
    return source.read(file, 0, size)


def sha256_of(pieces: Iterable[memoryview]) -> str:
    """sha256 of the pieces, one after the other."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def sample(source: Source, header: SafetensorsHeader) -> str:
    """sha256 over up to 16 pieces of a file's data.

    Checkpoints of one training run have equal names, sizes and headers; this tells them apart
    without reading them whole.
    """
    data = header.size - header.length
    pieces = [(0, data)]
    if data > _SAMPLE_ALL_BELOW:
        last = data - _SAMPLE_BYTES
        starts = [i * last // (_SAMPLES - 1) for i in range(_SAMPLES)]
        pieces = [(start, start + _SAMPLE_BYTES) for start in starts]
    ranges = [Range(header.file, header.length + a, header.length + b) for a, b in pieces]
    return sha256_of(source.read_many(ranges))


def check_weight_path(path: str, error: type[ReshardError], where: str, *, in_set: bool) -> None:
    """Raise `error` unless `path` names a weight file that an index or a manifest may name.

    That is a plain file name ending in `.safetensors`, below a stage directory if `in_set`.
    """
    directory, slash, name = path.rpartition("/")
    ok = (
        is_plain_name(name)
        and name.endswith(".safetensors")
        and (not slash or (in_set and STAGE_DIRECTORY.fullmatch(directory)))
    )
    if not ok:
        raise error(
            f"{where}: {quoted(repr(path))} is not an acceptable file name",
            hint="file names must be plain, without directories, and end in .safetensors",
        )


def foreign_weights(files: Collection[str], ours: Collection[str]) -> list[str]:
    """The weight files among `files` that are not `ours`, sorted."""
    suffixes = (*WEIGHT_SUFFIXES, ".ckpt", ".npz", ".pkl")
    weights = {path for path in files if path.lower().endswith(suffixes)}
    return sorted(weights.difference(ours))


def is_plain_name(name: str) -> bool:
    """Whether `name` is one part of a path, and can be nothing else."""
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0") and _encodable(name)


def _encodable(name: str) -> bool:
    try:
        return len(name.encode("utf-8")) <= 255
    except UnicodeEncodeError:
        return False
