"""The reading path that CUDA uses, run into plain memory: the right bytes, and no others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import DeviceError, SourceChangedError, StorageError
from reshard.progress import Silent
from reshard.runtime import StageWeights, load_stage, reading
from reshard.runtime.reading import Piece, Staging, fill
from reshard.runtime.share import Strip
from reshard.source import LocalSource
from tests.bundles import contents, make_set, rewrite
from tests.checkpoints import read_file
from tests.conftest import REPOSITORY

CPU = torch.device("cpu")
FILE_BYTES = 50_000
BIG: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "experts": 32, "layers": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LocalSource:
    """A directory with two files of noise."""
    root = tmp_path_factory.mktemp("noise")
    for seed, name in enumerate(("a", "b")):
        (root / name).write_bytes(np.random.default_rng(seed).bytes(FILE_BYTES))
    return LocalSource(root)


# --- pieces and buffers ---------------------------------------------------------------------------


@contextmanager
def limits(piece: int, worth_skipping: int) -> Iterator[None]:
    """Pieces and gaps as small as test files need them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", piece)
        patch.setattr(reading, "_SKIPPED_GAP", worth_skipping)
        yield


@st.composite
def strips(draw: st.DrawFn) -> Strip:
    """Pieces of any size with gaps of any size, anywhere in a file."""
    row_bytes = draw(st.integers(1, 200))
    stride = row_bytes + draw(st.integers(0, 200))
    pieces = draw(st.integers(1, 20))
    room = FILE_BYTES - pieces * stride
    return Strip(
        draw(st.sampled_from("ab")), draw(st.integers(0, room)), pieces, row_bytes, stride, 0
    )


def side_by_side(source: LocalSource, strip: Strip) -> bytes:
    data = (source.root / strip.file).read_bytes()
    starts = range(strip.begin, strip.begin + strip.rows * strip.stride, strip.stride)
    return b"".join(data[start : start + strip.row_bytes] for start in starts)


@given(
    st.lists(strips(), min_size=1, max_size=4),
    st.integers(20, 3000),
    st.sampled_from([1, 50, 10_000]),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_byte_comes_to_its_place(
    source: LocalSource,
    wanted: list[Strip],
    piece: int,
    worth_skipping: int,
    jobs: int,
    staged: bool,
) -> None:
    """Whatever the size of pieces, gaps and buffers, straight or through staging."""
    at, placed = 0, []
    for strip in wanted:
        placed.append(strip._replace(at=at))
        at += -(-strip.nbytes // 8) * 8
    target = torch.full((at,), 7, dtype=torch.uint8)
    with limits(piece, worth_skipping):
        pieces = [
            Piece(part, target[part.at : part.at + part.nbytes])
            for strip in placed
            for part in reading._pieces(strip)
        ]
        # What a thread reads at once, gaps included, fits into its buffer.
        assert all(s.is_range or (s.rows - 1) * s.stride + s.row_bytes <= piece for s, _ in pieces)
        assert all(s.nbytes <= piece for s, _ in pieces)
        fill(source, pieces, Staging(CPU, 2 * jobs) if staged else None, jobs, Silent())
    expected = bytearray(b"\7" * at)
    for strip in placed:
        expected[strip.at : strip.at + strip.nbytes] = side_by_side(source, strip)
    assert target.numpy().tobytes() == bytes(expected)


@given(strips(), st.integers(20, 3000), st.sampled_from([1, 50, 10_000]))
def test_only_small_gaps_are_read(strip: Strip, piece: int, worth_skipping: int) -> None:
    with limits(piece, worth_skipping):
        parts = list(reading._pieces(strip))
    assert sum(part.nbytes for part in parts) == strip.nbytes
    gap = strip.stride - strip.row_bytes
    if gap >= worth_skipping:
        assert all(part.is_range for part in parts)
    strided = [part for part in parts if not part.is_range]
    assert all(part.stride - part.row_bytes < worth_skipping for part in strided)


# --- a device whose copies come late --------------------------------------------------------------


class LateStream:
    """A CUDA stream that copies nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.copies: deque[Callable[[], object]] = deque()
        self.lock = threading.Lock()

    def wait_stream(self, other: object) -> None: ...

    def record_event(self) -> LateEvent:
        return LateEvent(self)

    def synchronize(self) -> None:
        with self.lock:
            while self.copies:
                self.copies.popleft()()


class LateEvent:
    def __init__(self, stream: LateStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.synchronize()


class LateTarget:
    """Memory of a device: what is copied to it in a stream arrives when that is waited for."""

    def __init__(self, memory: torch.Tensor, stream: LateStream) -> None:
        self.memory, self.stream = memory, stream

    def numel(self) -> int:
        return self.memory.numel()

    def copy_(self, filled: torch.Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        with self.stream.lock:
            self.stream.copies.append(lambda: self.memory.copy_(filled))


def test_a_buffer_is_not_filled_again_before_it_is_copied(
    source: LocalSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies overlap with reading; if each came as late as it may, nothing would be lost."""
    stream = LateStream()

    @contextmanager
    def current(chosen: object) -> Iterator[None]:
        assert chosen is stream
        yield

    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(reading, "PIECE", 1000)
    staging = Staging(torch.device("cuda", 0), 4)
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(reading, "PIECE", 1000)
    memory = torch.zeros(FILE_BYTES, dtype=torch.uint8)
    pieces = [
        Piece(part, cast(torch.Tensor, LateTarget(memory[part.at : part.at + part.nbytes], stream)))
        for part in reading._pieces(Strip("a", 0, 1, FILE_BYTES, FILE_BYTES, 0))
    ]
    fill(source, pieces, staging, 2, Silent())
    assert not stream.copies, "all copies were waited for"
    assert memory.numpy().tobytes() == (source.root / "a").read_bytes()


@pytest.mark.parametrize("jobs", [1, 2, 4])
def test_pieces_that_fail_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    """More pieces than buffers, and every one fails: the first error comes out, and soon."""
    (tmp_path / "a").write_bytes(bytes(FILE_BYTES))
    monkeypatch.setattr(reading, "PIECE", 10)
    target = torch.empty(FILE_BYTES, dtype=torch.uint8)
    pieces = [
        Piece(part, target[part.at : part.at + part.nbytes])
        for part in reading._pieces(Strip("a", 0, 1, FILE_BYTES, FILE_BYTES, 0))
    ]

    class Failing(LocalSource):
        def read_into(self, buffer: memoryview, descriptor: int, file: str, begin: int) -> None:
            raise StorageError(f"{file}: Input/output error")

    failed: list[BaseException] = []

    def run() -> None:
        try:
            fill(Failing(tmp_path), pieces, Staging(CPU, 2 * jobs), jobs, Silent())
        except StorageError as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and failed


# --- whole stages ---------------------------------------------------------------------------------


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain reads go through staging buffers, as they do for a device."""

    def through(
        source: LocalSource, pieces: list[Piece], staging: None, jobs: int, progress: Silent
    ) -> None:
        fill(source, pieces, Staging(CPU, 2 * jobs), jobs, progress)

    monkeypatch.setattr(reading, "fill", through)


def all_ranks(path: Path, **arguments: Any) -> list[StageWeights]:
    """A stage whole, and in the parts of a few ranks."""
    ranks = [((0, 1), (0, 1)), ((1, 3), (0, 1)), ((0, 1), (1, 2)), ((2, 3), (0, 2))]
    return [load_stage(path, ep=ep, tp=tp, device="cpu", **arguments) for ep, tp in ranks]


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("weights", ["bf16", "bf16_per_expert"])
@pytest.mark.parametrize("piece", [1000, 1 << 20])
def test_staging_gives_what_mapping_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, piece: int
) -> None:
    out = make_set(tmp_path, weights=weights, layers=2) / "stage-01-of-02"
    mapped = all_ranks(out)
    monkeypatch.setattr(reading, "PIECE", piece)
    monkeypatch.setattr(reading, "_SKIPPED_GAP", 300)
    for one, other in zip(mapped, all_ranks(out, mmap=False), strict=True):
        assert contents(one.tensors) == contents(other.tensors)
        assert torch.equal(one.experts[1].w13, other.experts[1].w13)
        assert torch.equal(one.experts[1].w2, other.experts[1].w2)


def shuffled(stage: Path, copy: Path) -> Path:
    """A stage whose experts lie in the file in another order than the bundle format gives them."""
    shutil.copytree(stage, copy)
    file = "model-layer-00001.safetensors"
    rewrite(copy, {file: dict(reversed(read_file(stage / file).items()))})
    return copy


@pytest.mark.parametrize("mmap", [True, False])
def test_experts_in_another_order_are_stacked(tmp_path: Path, mmap: bool) -> None:
    sizes: dict[str, Any] = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    out = make_set(tmp_path, weights="fp8", layers=2, **sizes) / "stage-01-of-02"
    before = all_ranks(out)
    after = all_ranks(shuffled(out, tmp_path / "copy"), mmap=mmap)
    for one, other in zip(before, after, strict=True):
        assert contents(one.tensors) == contents(other.tensors)
        for name in ("w13", "w2", "w13_scale", "w2_scale"):
            right, found = getattr(one.experts[1], name), getattr(other.experts[1], name)
            assert torch.equal(right.view(torch.uint8), found.view(torch.uint8)), name
        # Once: the tensors of single experts are views of the stack.
        name = f"model.language_model.layers.1.mlp.experts.{other.experts[1].first_expert}"
        gate = other.tensors[f"{name}.gate_proj.weight"]
        assert gate.data_ptr() == other.experts[1].w13.data_ptr()


def test_tensors_that_lie_anywhere(tmp_path: Path) -> None:
    """A tensor that does not begin at a multiple of its element is read, not mapped."""
    stage = make_set(tmp_path, weights="bf16", layers=2) / "stage-01-of-02"
    file = "model-layer-00001.safetensors"
    before = contents(load_stage(stage, device="cpu").tensors)
    prefix = "model.language_model.layers.1."
    odd = {f"{prefix}odd": ("U8", (3,), b"abc")}
    rewrite(stage, {file: {**odd, **read_file(stage / file)}})
    for mapped in (True, False):
        after = load_stage(stage, device="cpu", mmap=mapped)
        found = contents(after.tensors)
        assert found.pop(f"{prefix}odd") == (torch.uint8, (3,), b"abc")
        assert found == before
        assert all(t.data_ptr() % t.element_size() == 0 for t in after.tensors.values())


# --- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["truncated", "replaced", "touched"])
def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    stage = make_set(tmp_path, layers=2) / "stage-01-of-02"
    file = stage / "model-layer-00001.safetensors"
    read_into = LocalSource.read_into

    def meanwhile(self: LocalSource, buffer: memoryview, descriptor: int, *rest: Any) -> None:
        if change == "truncated":
            os.truncate(file, 5000)
        elif change == "touched":
            os.utime(file, ns=(0, 0))
        read_into(self, buffer, descriptor, *rest)

    if change == "replaced":  # after the header was proved, and before it is read
        opened = LocalSource.opened

        def other(self: LocalSource, name: str) -> Any:
            if name == file.name:
                copy = file.read_bytes()
                file.unlink()
                file.write_bytes(copy)
            return opened(self, name)

        monkeypatch.setattr(LocalSource, "opened", other)
    else:
        monkeypatch.setattr(LocalSource, "read_into", meanwhile)
    with pytest.raises(SourceChangedError, match="model-layer-00001.safetensors"):
        load_stage(stage, device="cpu", mmap=False)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk names the file."""
    stage = make_set(tmp_path, layers=2) / "stage-01-of-02"
    preadv = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 4096 and os.readlink(f"/proc/self/fd/{descriptor}").endswith(
            "00001.safetensors"
        ):
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(StorageError, match="00001.safetensors: Input/output error") as caught:
        load_stage(stage, device="cpu", mmap=False)
    assert caught.value.hint


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which file, and how much it needs."""
    stage = make_set(tmp_path, layers=2) / "stage-01-of-02"

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(DeviceError, match=r"safetensors: .* are needed for it on cpu") as caught:
        load_stage(stage, device="cpu", mmap=False)
    assert "ep, tp" in (caught.value.hint or "")


# --- what a process reads, and how much memory it takes -------------------------------------------

_MEASURED = """
import json, re, sys
from pathlib import Path
from reshard.runtime import load_stage

small, path, ep = sys.argv[1:]

def value(file, field):
    return int(re.search(rf"^{field}:\\s+(\\d+)", Path(file).read_text(), re.MULTILINE)[1])

def load(path, **arguments):
    return load_stage(path, device="cpu", mmap=False, jobs=2, **arguments)

load(small)  # what is imported late, and read for that, is no part of it
memory, read = value("/proc/self/status", "VmHWM"), value("/proc/self/io", "rchar")
stage = load(path, ep=json.loads(ep))
read = value("/proc/self/io", "rchar") - read
memory = (value("/proc/self/status", "VmHWM") - memory) << 10
held = sum(t.nbytes for t in stage.tensors.values())
experts = sum(t.nbytes for name, t in stage.tensors.items() if ".mlp.experts." in name)
print(json.dumps({"read": read, "memory": memory, "held": held, "experts": experts}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, int]]:
    """What a process of its own reads and takes, loading the last stage of a set of some MB."""
    root = tmp_path_factory.mktemp("measured")
    small = make_set(root / "small", layers=2)

    @cache
    def measure(weights: str, ep: tuple[int, int] = (0, 1)) -> dict[str, int]:
        out = root / weights / "out"
        if not out.exists():
            make_set(root / weights, weights=weights, **BIG)
        stage = out / "stage-01-of-02"
        arguments = (small / "stage-01-of-02", stage, json.dumps(ep))
        command = [sys.executable, "-c", _MEASURED, *map(str, arguments)]
        done = subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE)
        found: dict[str, int] = json.loads(done.stdout)
        return {**found, "files": sum(file.stat().st_size for file in stage.glob("*.safetensors"))}

    return measure


needs_proc = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counted by Linux")


@needs_proc
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_stage_is_read_once(measured: Callable[..., dict[str, int]], weights: str) -> None:
    """Within 1 % of its bytes; memory holds it once, with no buffer beside."""
    whole = measured(weights)
    assert whole["held"] > 10e6
    assert whole["files"] * 0.99 < whole["read"] < whole["files"] * 1.01
    assert whole["memory"] < whole["held"] + (4 << 20)


@needs_proc
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_a_rank_reads_its_experts_alone(
    measured: Callable[..., dict[str, int]], weights: str
) -> None:
    whole, rank = measured(weights), measured(weights, ep=(2, 4))
    expected = whole["experts"] / 4 + whole["files"] - whole["experts"]
    assert rank["experts"] * 4 == whole["experts"] > whole["held"] * 0.8
    assert expected * 0.99 < rank["read"] < expected * 1.01
    assert rank["memory"] < rank["held"] + (4 << 20)
