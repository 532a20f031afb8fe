"""Bringing a rank's share into memory: mapped files, plain buffers, or buffers on a device.

A device is filled through a few pinned buffers: threads read large pieces of the files into them
while earlier ones are being copied. So the host never holds more of the weights than these buffers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from math import gcd
from queue import SimpleQueue
from threading import Event, local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reshard.errors import DeviceError, quoted, storage_errors
from reshard.progress import Progress
from reshard.runtime.dtypes import item_bytes
from reshard.runtime.share import Share, StageShare, Strip
from reshard.source import LocalSource
from reshard.tasks import in_parallel
from reshard.units import size

PIECE = 16 << 20
"""Bytes that one thread reads at a time."""

_SKIPPED_GAP = 64 << 10
"""Gaps from this size on are left out; smaller ones are read as well, as the system does anyway."""


_READ_WHOLE = 0.95
"""A file of which at least so much is wanted is read as a whole, with what the system reads ahead."""


def read_shares(
    source: LocalSource,
    share: StageShare,
    device: torch.device,
    *,
    mapped: bool,
    jobs: int,
    progress: Progress,
) -> list[Tensor]:
    """The bytes of every share: uint8 tensors on `device`, views into one buffer for each file.

    mapped: on the CPU, map the files whose shares need no putting together instead of reading them.
    Writing to such a tensor changes the memory of this process, never the file.

    Raises `DeviceError` where there is too little memory, `SourceChangedError`, `StorageError`.
    """
    read = {part.file for part in share.shares if not (mapped and _can_be_mapped(part))}
    sizes = share.buffer_bytes()
    memory = {
        file: _buffer(nbytes, file, device) if file in read else _mapped(source, file)
        for file, nbytes in sizes.items()
    }
    pieces = [
        Piece(strip, memory[part.file][strip.at : strip.at + strip.nbytes])
        for part in share.shares
        if part.file in read
        for whole in part.strips
        for strip in _pieces(whole)
    ]
    progress.start("load", sum(piece.strip.nbytes for piece in pieces))
    staging = Staging(device, 2 * jobs) if device.type != "cpu" else None
    fill(source, pieces, staging, jobs, progress)
    begins = [part.at if part.file in read else part.strips[0].begin for part in share.shares]
    return [
        memory[part.file][begin : begin + part.nbytes]
        for part, begin in zip(share.shares, begins, strict=True)
    ]


class Piece(NamedTuple):
    """A strip of at most `PIECE` bytes, gaps included, and where its bytes go."""

    strip: Strip
    target: Tensor


class Staging:
    """Host buffers through which bytes go to a device; filling one and copying others overlap."""

    def __init__(self, device: torch.device, count: int) -> None:
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        if self._stream is not None:  # the targets may be memory that is still in use there
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._free: SimpleQueue[tuple[Tensor, torch.cuda.Event | None]] = SimpleQueue()
        for _ in range(count):
            self._free.put((_host_buffer(pinned=cuda), None))

    @contextmanager
    def copying(self, target: Tensor) -> Iterator[Tensor]:
        """A host buffer to fill; when the block ends well, its copy to `target` begins."""
        buffer, copied = self._free.get()
        try:
            if copied is not None:  # the buffer is still being copied from
                copied.synchronize()
            filled = buffer[: target.numel()]
            yield filled
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                target.copy_(filled, non_blocking=True)
                copied = self._stream.record_event() if self._stream is not None else None
        finally:
            self._free.put((buffer, copied))  # others may be waiting for one

    def finish(self) -> None:
        """Wait for all copies."""
        if self._stream is not None:
            self._stream.synchronize()


def fill(
    source: LocalSource,
    pieces: list[Piece],
    staging: Staging | None,
    jobs: int,
    progress: Progress,
) -> None:
    """Read all pieces into their targets, `jobs` threads at a time; `staging`: on their way."""
    scratch = local()
    with ExitStack() as stack:
        wanted = Counter[str]()
        for piece in pieces:
            wanted[piece.strip.file] += piece.strip.nbytes
        descriptors = {file: stack.enter_context(source.opened(file)) for file in wanted}
        for file, descriptor in descriptors.items():
            # Between the parts that are wanted of a file, the system must not read ahead.
            in_part = wanted[file] < source.stamp(file).size * _READ_WHOLE
            if in_part and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

        def work(piece: Piece, stop: Event) -> None:
            strip, target = piece
            way = staging.copying(target) if staging is not None else nullcontext(target)
            with way as into:
                _read(source, strip, descriptors[strip.file], into, scratch)
            progress.advance(strip.nbytes)

        try:
            for _ in in_parallel(work, pieces, jobs):
                pass
        finally:
            if staging is not None:
                staging.finish()


def _read(source: LocalSource, strip: Strip, descriptor: int, into: Tensor, scratch: Any) -> None:
    """The bytes of a strip, side by side, into a tensor on the host."""
    if strip.is_range:
        source.read_into(_memory(into), descriptor, strip.file, strip.begin)
        return
    if not hasattr(scratch, "buffer"):
        scratch.buffer = _host_buffer(pinned=False)
    raw = scratch.buffer[: (strip.rows - 1) * strip.stride + strip.row_bytes]
    source.read_into(_memory(raw), descriptor, strip.file, strip.begin)
    # Wider elements are copied faster than bytes.
    item = gcd(8, strip.row_bytes, strip.stride, strip.at)
    wide = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[item]
    shape = strip.rows, strip.row_bytes // item
    pieces = raw.view(wide).as_strided(shape, (strip.stride // item, 1))
    into.view(wide).view(shape).copy_(pieces)


def _pieces(strip: Strip) -> Iterator[Strip]:
    """The strip in pieces that can be read at a time."""
    file, begin, rows, row_bytes, stride, at = strip
    if strip.is_range:
        for done in range(0, strip.nbytes, PIECE):
            part = min(PIECE, strip.nbytes - done)
            yield Strip(file, begin + done, 1, part, part, at + done)
    elif stride - row_bytes >= _SKIPPED_GAP or stride > PIECE:
        for n in range(rows):
            row = Strip(file, begin + n * stride, 1, row_bytes, row_bytes, at + n * row_bytes)
            yield from _pieces(row)
    else:
        step = PIECE // stride
        for n in range(0, rows, step):
            count = min(step, rows - n)
            yield Strip(file, begin + n * stride, count, row_bytes, stride, at + n * row_bytes)


def _can_be_mapped(share: Share) -> bool:
    """Whether its bytes lie in the file as they have to lie in memory."""
    strip = share.strips[0]
    return len(share.strips) == 1 and strip.is_range and strip.begin % item_bytes(share.dtype) == 0


def _mapped(source: LocalSource, file: str) -> Tensor:
    """All bytes of a file. Pages come from the page cache, and are copied when written to."""
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    with source.opened(file) as descriptor, storage_errors(source.root / file):
        mapping = mmap.mmap(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _buffer(nbytes: int, file: str, device: torch.device) -> Tensor:
    """Memory for what is read of a file."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        free = ""
        if device.type == "cuda":
            free = f", {size(torch.cuda.mem_get_info(device)[0])} are free"
        raise DeviceError(
            f"{quoted(file)}: {size(nbytes)} are needed for it on {device}{free}",
            hint="use a device with more memory, more stages, or a part of the experts: ep, tp",
        ) from error


def _host_buffer(*, pinned: bool) -> Tensor:
    """Memory for one piece, on its way."""
    try:
        return torch.empty(PIECE, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        kind = "pinned memory" if pinned else "memory"
        raise DeviceError(
            f"there is not enough {kind} on the host for another buffer of {size(PIECE)}",
            hint="load with fewer jobs, or free some memory",
        ) from error


def _memory(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    array = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")
