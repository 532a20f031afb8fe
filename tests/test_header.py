"""The strict reader and the canonical writer of safetensors headers."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import CheckpointError, HeaderError, ReshardError
from reshard.header import ALIGNMENT, DTYPE_BITS, SafetensorsHeader, TensorInfo, encode_header
from reshard.source import LocalSource, read_header
from tests.checkpoints import HostileFile, hostile_files, huge_files

FILE = "model-00001-of-00002.safetensors"


def read(path: Path) -> SafetensorsHeader:
    return read_header(LocalSource(path.parent), path.name)


def write(directory: Path, data: bytes) -> Path:
    path = directory / FILE
    path.write_bytes(data)
    return path


def described(data: bytes) -> list[tuple[str, str, list[int], list[int]]]:
    """What a valid file's own JSON says: (name, dtype, shape, data_offsets), by offset."""
    (length,) = struct.unpack_from("<Q", data)
    entries = json.loads(data[8 : 8 + length])
    entries.pop("__metadata__", None)
    found = [(n, e["dtype"], e["shape"], e["data_offsets"]) for n, e in entries.items()]
    return sorted(found, key=lambda entry: entry[3])


def deserialize(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> dtype, shape and bytes, as the safetensors library reads them."""
    return {
        name: (tensor["dtype"], tensor["shape"], bytes(tensor["data"]))
        for name, tensor in safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    }


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raise inside the block where it takes longer, even in a system call that blocks."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"blocked for {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [f for f in hostile_files() if f.accept], ids=lambda f: f.id)
def test_unusual_but_valid_files_are_read(tmp_path: Path, case: HostileFile) -> None:
    header = read(write(tmp_path, case.data))
    start = header.length
    assert start == 8 + struct.unpack_from("<Q", case.data)[0]
    assert header.size == len(case.data)
    assert [
        (t.name, t.dtype, list(t.shape), [t.begin - start, t.end - start]) for t in header.tensors
    ] == described(case.data)
    assert {t.file for t in header.tensors} <= {FILE}


@pytest.mark.parametrize("case", [f for f in hostile_files() if not f.accept], ids=lambda f: f.id)
def test_broken_files_are_refused_and_named(tmp_path: Path, case: HostileFile) -> None:
    path = write(tmp_path, case.data)
    with pytest.raises(HeaderError) as refusal:
        read(path)
    assert all(word in refusal.value.message for word in (FILE, *case.words))
    assert len(refusal.value.message) < 1000
    assert refusal.value.message.isprintable()


def test_huge_headers_are_read(tmp_path: Path) -> None:
    for case in huge_files():
        header = read(write(tmp_path, case.data))
        assert [t.name for t in header.tensors] == [name for name, *_ in described(case.data)]


def test_the_library_agrees_with_every_file_that_it_can_read(tmp_path: Path) -> None:
    compared = 0
    for case in hostile_files():
        try:
            theirs = deserialize(case.data)
        except safetensors.SafetensorError:
            continue
        if not case.accept:  # the two leniencies that reshard does not share
            assert case.id in {"space-before-json", "duplicate-equal"}
            continue
        path = write(tmp_path, case.data)
        data = path.read_bytes()
        ours = {t.name: (t.dtype, list(t.shape), data[t.begin : t.end]) for t in read(path).tensors}
        assert ours == theirs
        compared += 1
    assert compared > 20


def test_metadata_is_read(tmp_path: Path) -> None:
    text = b'{"__metadata__":{"format":"pt","step":"7"}}'
    header = read(write(tmp_path, struct.pack("<Q", len(text)) + text))
    assert header.metadata == {"format": "pt", "step": "7"}


def test_long_and_control_characters_are_shortened_in_messages(tmp_path: Path) -> None:
    name = "\x1b[2J" + "a" * 100_000
    text = json.dumps({name: {"dtype": "U8", "shape": [4]}}).encode()
    with pytest.raises(HeaderError, match="100004 characters") as refusal:
        read(write(tmp_path, struct.pack("<Q", len(text)) + text))
    assert "\x1b" not in refusal.value.message
    assert len(refusal.value.message) < 400


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = encode_header([TensorInfo("a", "U8", (8,), 0, 8, "")])[:4096] + b"12345678"
    for size in (1, 7, 8, 9, 100, 4095, 4096, 4103):
        with pytest.raises(HeaderError, match=FILE):
            read(write(tmp_path, whole[:size]))
    assert read(write(tmp_path, whole)).tensors[0].nbytes == 8


# --- what is no regular file ----------------------------------------------------------------------


def test_a_directory_is_not_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(ReshardError, match=f"{FILE} is not a regular file"):
        read(tmp_path / FILE)


@pytest.mark.parametrize("linked", [False, True], ids=["direct", "linked"])
def test_a_fifo_is_not_a_regular_file_and_does_not_block(tmp_path: Path, linked: bool) -> None:
    os.mkfifo(tmp_path / ("pipe" if linked else FILE))
    if linked:
        (tmp_path / FILE).symlink_to("pipe")
    with at_most(5), pytest.raises(ReshardError, match=f"{FILE} is not a regular file"):
        read(tmp_path / FILE)


def test_a_broken_link_is_called_one(tmp_path: Path) -> None:
    (tmp_path / FILE).symlink_to("../../blobs/gone")
    with pytest.raises(CheckpointError, match=f"{FILE} is a broken link") as refusal:
        read(tmp_path / FILE)
    assert refusal.value.hint is not None and "blobs/gone" in refusal.value.hint


def test_a_link_to_a_regular_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    blob = write(tmp_path / "blobs", encode_header([]))
    (tmp_path / FILE).symlink_to(blob)
    assert read(tmp_path / FILE).tensors == ()


# --- writing --------------------------------------------------------------------------------------

UNITS = {dtype: bits // 8 if bits >= 8 else bits for dtype, bits in DTYPE_BITS.items()}
"""Bytes of the smallest whole piece: an element, 8 elements of 4 or 6 bits."""


@st.composite
def tensor_lists(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(DTYPE_BITS)) -> list[TensorInfo]:
    """Tensors of any name, dtype and small shape; offsets as if each lay in a file of its own."""
    names = draw(
        st.lists(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(
                lambda name: name != "__metadata__"
            ),
            unique=True,
            max_size=8,
        )
    )
    tensors = []
    for name in names:
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if DTYPE_BITS.get(dtype, 8) < 8:
            shape.append(8)
        size = UNITS.get(dtype, 1)
        for dimension in shape[:-1] if DTYPE_BITS.get(dtype, 8) < 8 else shape:
            size *= dimension
        begin = draw(st.integers(0, 2**40))
        tensors.append(TensorInfo(name, dtype, tuple(shape), begin, begin + size, "elsewhere"))
    return tensors


def json_text(text: str) -> str:
    """A JSON string by the letter of the format: nothing is escaped but what must be."""
    short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f"}
    short |= {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
    parts = [short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text]
    return '"' + "".join(parts) + '"'


def spelled_out(tensors: list[TensorInfo]) -> bytes:
    """The canonical header, written by hand."""
    entries = ['"__metadata__":{"format":"pt"}']
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        shape = ",".join(map(str, tensor.shape))
        entries.append(
            f'{json_text(tensor.name)}:{{"dtype":"{tensor.dtype}","shape":[{shape}],'
            f'"data_offsets":[{position},{end}]}}'
        )
        position = end
    text = ("{" + ",".join(entries) + "}").encode("utf-8")
    text += b" " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text


@given(tensor_lists())
def test_a_written_header_is_the_canonical_one(tensors: list[TensorInfo]) -> None:
    assert encode_header(tensors) == spelled_out(tensors)


@given(tensor_lists())
def test_a_written_header_reads_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[TensorInfo]
) -> None:
    start = encode_header(tensors)
    assert ALIGNMENT == 4096 and len(start) % 4096 == 0
    data = os.urandom(sum(t.nbytes for t in tensors))
    path = write(tmp_path_factory.getbasetemp(), start + data)

    header = read(path)
    assert header.length == len(start)
    assert header.metadata == {"format": "pt"}
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors] == [
        (t.name, t.dtype, t.shape, t.nbytes) for t in tensors
    ]

    expected, position = {}, 0
    for tensor in tensors:
        piece = data[position : position + tensor.nbytes]
        expected[tensor.name] = (tensor.dtype, list(tensor.shape), piece)
        position += tensor.nbytes
    assert deserialize(start + data) == expected


@given(tensor_lists(dtypes=("F31", "I4", "bf16", "FP_X")))
def test_dtypes_of_the_future_keep_their_bytes(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[TensorInfo]
) -> None:
    start = encode_header(tensors)
    path = write(tmp_path_factory.getbasetemp(), start + bytes(sum(t.nbytes for t in tensors)))
    assert [(t.name, t.dtype, t.nbytes) for t in read(path).tensors] == [
        (t.name, t.dtype, t.nbytes) for t in tensors
    ]


def test_characters_are_escaped_only_where_json_demands_it() -> None:
    name = '\x00\x1f\b\f\n\r\t"\\/\x7f\u00e9\u2028\U0001f600'
    start = encode_header([TensorInfo(name, "U8", (), 0, 1, "")])
    wanted = r"\u0000\u001f\b\f\n\r\t\"\\/" + "\x7f\u00e9\u2028\U0001f600"
    assert f'"{wanted}":{{"dtype":"U8","shape":[],"data_offsets":[0,1]}}'.encode() in start


def test_metadata_is_format_pt_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, encode_header([]))
    assert read(path).metadata == {"format": "pt"}
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_a_header_that_readers_would_refuse_is_not_written() -> None:
    tail = "a" * 10_000_000
    tensors = [TensorInfo(f"{n}{tail}", "U8", (), 0, 1, "") for n in range(10)]
    with pytest.raises(HeaderError, match="exceed the limit of 100,000,000"):
        encode_header(tensors)
    assert len(encode_header(tensors[:9])) > 90_000_000
