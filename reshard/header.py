"""The safetensors header: a strict reader and the canonical writer.

A safetensors file is a little-endian u64 N, N bytes of JSON, and the tensors' data, without gaps.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from reshard.errors import HeaderError, quoted
from reshard.strict_json import parse_object

MAX_HEADER = 100_000_000
"""The largest N that the safetensors library reads (`MAX_HEADER_SIZE`)."""

ALIGNMENT = 4096
"""Canonical files start their data at a multiple of this many bytes."""

PROBE = 1024
"""How many leading bytes `header_size` wants, to tell what a file is that is not safetensors."""

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

_MAX_BITS = 2**67  # no file holds more than 2**64 bytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. `begin` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: str

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The header of one file: `size` bytes in all, of which the first `length` are the header.

    `tensors` are in the order of their data; `sha256` is over the first `length` bytes.
    """

    file: str
    size: int
    length: int
    tensors: tuple[TensorInfo, ...] = field(repr=False)
    metadata: Mapping[str, str]
    sha256: str


def header_size(file: str, start: bytes, size: int) -> int:
    """How many bytes the header takes (8 + N), from the first bytes of a file of `size` bytes.

    `start` holds the first min(`size`, `PROBE`) bytes. Raises `HeaderError` where this is no
    safetensors file.
    """
    what = quoted(file)
    again = "download the file again"
    if size == 0:
        raise HeaderError(f"{what}: file is empty", hint=again)
    if start.startswith(b"version https://git-lfs"):
        raise HeaderError(
            f"{what}: this is a git-lfs pointer, not weights", hint="run: git lfs pull"
        )
    if start.lstrip()[:9].lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        raise HeaderError(f"{what}: looks like a web page, not weights", hint=again)
    if size < 8:
        raise HeaderError(f"{what}: file is shorter than 8 bytes ({size})", hint=again)
    length: int = struct.unpack_from("<Q", start)[0]
    if length == 0:
        raise HeaderError(f"{what}: header length 0", hint=again)
    if length > MAX_HEADER:
        raise HeaderError(
            f"{what}: header length {length} exceeds the limit of {MAX_HEADER:,}",
            hint="this is no safetensors file, or a damaged one",
        )
    if 8 + length > size:
        raise HeaderError(
            f"{what}: header needs {8 + length} bytes, file has {size} (truncated?)", hint=again
        )
    return 8 + length


def parse_header(file: str, raw: bytes, size: int) -> SafetensorsHeader:
    """Parse the first `header_size` bytes of a file of `size` bytes.

    Raises `HeaderError`, naming the file, the tensor where there is one, and what is wrong. A dtype
    that reshard does not know is accepted: its size is what its offsets say.
    """
    what = quoted(file)
    if raw[8:9] != b"{":
        raise HeaderError(f"{what}: header must start with {{ (found {raw[8:9]!r})")
    entries = parse_object(
        raw[8:], f"{what}: header", HeaderError, duplicate="duplicate tensor name or field"
    )
    metadata = _metadata(what, entries.pop("__metadata__", None))
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    tensors = []
    for name, entry in entries.items():
        dtype, shape, begin, end = _entry(what, name, entry)
        shape = shapes.setdefault(shape, shape)
        dtype = dtypes.setdefault(dtype, dtype)
        tensors.append(TensorInfo(name, dtype, shape, len(raw) + begin, len(raw) + end, file))
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_coverage(what, tensors, len(raw), size)
    digest = hashlib.sha256(raw).hexdigest()
    return SafetensorsHeader(file, size, len(raw), tuple(tensors), metadata, digest)


def _metadata(what: str, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise HeaderError(f"{what}: metadata must map text to text")
    return value


def _entry(what: str, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and data_offsets of one header entry, checked against each other."""

    def fault(message: str) -> HeaderError:
        return HeaderError(f"{what}: tensor {quoted(name)}: {message}")

    if not isinstance(entry, dict):
        raise fault("entry must be an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise fault(f"entry lacks {key}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and dtype and dtype.isascii() and dtype.isprintable()):
        raise fault(f"bad dtype {quoted(repr(dtype))}")
    if not _whole_numbers(shape):
        raise fault(f"bad shape {quoted(repr(shape))}")
    if not (_whole_numbers(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1] < 2**64):
        raise fault(f"bad data_offsets {quoted(repr(offsets))}")
    begin, end = offsets
    bits = DTYPE_BITS.get(dtype)
    # A dtype of the future has at least one bit an element, so absurd shapes are told either way.
    needed = bits or 1
    for dimension in shape:
        needed *= dimension
        if needed > _MAX_BITS:
            raise fault(f"bad shape {quoted(repr(shape))} (overflow)")
    if bits is not None and needed != 8 * (end - begin):
        if needed % 8:
            raise fault(f"{bits}-bit tensor with odd element count, shape {quoted(repr(shape))}")
        raise fault(
            f"shape {quoted(repr(shape))} {dtype} needs {needed // 8} bytes, "
            f"offsets give {end - begin}"
        )
    return dtype, tuple(shape), begin, end


def _whole_numbers(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for number in value:  # a plain loop: called twice for every tensor
        if type(number) is not int or number < 0:
            return False
    return True


def _check_coverage(what: str, tensors: list[TensorInfo], length: int, size: int) -> None:
    """The tensors, sorted by offset, must cover the data exactly."""
    position, before = length, ""
    for tensor in tensors:
        if tensor.begin != position:
            at = f"byte {min(tensor.begin, position) - length}"
            name = quoted(tensor.name)
            if tensor.begin < position:
                fault = f"tensors {quoted(before)} and {name} overlap at {at}"
            elif before:
                fault = f"tensors {quoted(before)} and {name} leave a gap at {at}"
            else:
                fault = f"tensor {name}: the data leaves a gap at {at}"
            raise HeaderError(f"{what}: {fault}")
        position, before = tensor.end, tensor.name
    if position > size:
        raise HeaderError(
            f"{what}: file ends {position - size} bytes early (truncated?)",
            hint="download the file again",
        )
    if position < size:
        raise HeaderError(f"{what}: {size - position} bytes not described by the header")


def encode_header(tensors: Iterable[TensorInfo]) -> bytes:
    """The first 8 + N bytes of a canonical file that holds `tensors` in this order.

    docs/bundle-format.md gives the rules; the result's length is a multiple of `ALIGNMENT`. Raises
    `HeaderError` where the header would be larger than readers accept.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise HeaderError(
            f"a header of {len(text):,} bytes would exceed the limit of {MAX_HEADER:,}"
        )
    return struct.pack("<Q", len(text)) + text
