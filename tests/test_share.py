"""What a rank holds of a layer: the strips bring the bytes that slicing the tensors gives."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import tiny_checkpoint as tiny
from examples.tiny_checkpoint import Tensors
from reshard.canonical import canonical_order
from reshard.config import ModelConfig
from reshard.errors import UsageError, WeightsError
from reshard.header import TensorInfo
from reshard.runtime import share as share_module
from reshard.runtime.config import MoeConfig
from reshard.runtime.share import ALIGNMENT, Rank, Share, StageShare, plan_share

Array = npt.NDArray[np.void]
"""A tensor whose elements are opaque: so many bytes each."""

MLP = "model.language_model.layers.3.mlp."
BEGIN = 4096
WHOLE = Rank(0, 1)
FAMILY = {"fused": "qwen3_5_moe", "transposed": "qwen3_vl_moe", "per_expert": "qwen3_5_moe"}


def fp8(tensors: Tensors, block: tuple[int, int]) -> Tensors:
    """The matrices among these in FP8, with their scales: gate and up are rounded up one by one."""
    packed: Tensors = {}
    for name, (_, (*experts, rows, columns)) in tensors.items():
        packed[name] = ("F8_E4M3", (*experts, rows, columns))
        halves = 2 if name.endswith("gate_up_proj") else 1
        scale = halves * -(-rows // halves // block[0]), -(-columns // block[1])
        packed[f"{name}_scale_inv"] = ("BF16", (*experts, *scale))
    return packed


@dataclass(frozen=True)
class Layer:
    """The MLP of a layer, in one file: as released, or with its tensors in any order (`seed`)."""

    form: str
    experts: int
    hidden: int
    inner: int
    shared: int
    dtype: str = "BF16"
    block: tuple[int, int] = (1, 1)
    seed: int | None = None

    @cached_property
    def tensors(self) -> list[TensorInfo]:
        dims = tiny.Dims(
            hidden_size=self.hidden,
            num_experts=self.experts,
            moe_intermediate_size=self.inner,
        )
        stored: Tensors = {}
        if self.form == "per_expert":
            stored = tiny.separate_experts(f"{MLP}experts.", dims)
        else:
            for name, (_, (e, rows, columns)) in tiny.fused_experts(f"{MLP}experts.", dims).items():
                last = (columns, rows) if self.form == "transposed" else (rows, columns)
                stored[name] = ("BF16", (e, *last))
        if self.shared:
            stored |= tiny.gated_mlp(f"{MLP}shared_expert.", self.hidden, self.shared)
        if self.dtype == "F8_E4M3":
            stored = fp8(stored, self.block)
        else:
            stored = {name: (self.dtype, shape) for name, (_, shape) in stored.items()}
        stored |= tiny.bf16(MLP, gate=(self.experts, self.hidden))
        stored[f"{MLP}none"] = ("F32", (0, 4))
        sized = [
            TensorInfo(name, dtype, shape, 0, tiny.nbytes(dtype, shape), "file")
            for name, (dtype, shape) in stored.items()
        ]
        ordered = [tensor for group in canonical_order(sized) for tensor in group]
        if self.seed is not None:
            random.Random(self.seed).shuffle(ordered)
        placed: list[TensorInfo] = []
        for tensor in ordered:
            begin = placed[-1].end if placed else BEGIN
            end = begin + tensor.nbytes
            placed.append(TensorInfo(tensor.name, tensor.dtype, tensor.shape, begin, end, "file"))
        return placed

    @cached_property
    def file(self) -> npt.NDArray[np.uint8]:
        size = max(tensor.end for tensor in self.tensors)
        return np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)

    def array(self, tensor: TensorInfo) -> Array:
        item = tiny.BITS[tensor.dtype] // 8
        data = self.file[tensor.begin : tensor.end]
        return np.frombuffer(data.tobytes(), f"V{item}").reshape(tensor.shape)

    @property
    def config(self) -> MoeConfig:
        quantization = {"quant_method": "fp8", "weight_block_size": [*self.block]}
        config: dict[str, Any] = {
            "model_type": FAMILY[self.form],
            "num_hidden_layers": 4,
            "num_experts": self.experts,
            "num_experts_per_tok": 1,
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inner,
            "quantization_config": quantization if self.dtype == "F8_E4M3" else None,
        }
        return MoeConfig.from_json(config, ModelConfig.from_json(config))

    def plan(self, ep: Rank = WHOLE, tp: Rank = WHOLE) -> StageShare:
        return plan_share([self.tensors], ep, tp, self.config if tp.size > 1 else None)


# --- what ranks must hold, said by slicing --------------------------------------------------------


def part(array: Array, axis: int, rank: Rank) -> Array:
    """The rank's equal part along an axis."""
    return np.split(array, rank.size, axis)[rank.rank]


def gate_and_up(array: Array, axis: int, rank: Rank) -> Array:
    """Its part of the rows of gate, then its part of the rows of up."""
    halves = np.split(array, 2, axis)
    return np.concatenate([part(half, axis, rank) for half in halves], axis)


def expected(layer: Layer, ep: Rank, tp: Rank) -> dict[str, Array]:
    """What the rank holds, by the names of the tensors."""
    first, end = (layer.experts * rank // ep.size for rank in (ep.rank, ep.rank + 1))
    swapped = layer.form == "transposed"
    found: dict[str, Array] = {}
    for tensor in layer.tensors:
        name, array = tensor.name.removeprefix(MLP), layer.array(tensor)
        expert = name.split(".")[1] if name.startswith("experts.") else ""
        if expert.isdigit():
            if first <= int(expert) < end:
                found[tensor.name] = part(array, 1 if ".down_" in name else 0, tp)
        elif expert.startswith("gate_up"):
            found[tensor.name] = gate_and_up(array[first:end], 2 if swapped else 1, tp)
        elif expert.startswith("down"):
            found[tensor.name] = part(array[first:end], 1 if swapped else 2, tp)
        elif name.startswith("shared_expert."):
            found[tensor.name] = part(array, 1 if ".down_" in name else 0, tp)
        else:
            found[tensor.name] = array
    return found


def positions(share: Share) -> npt.NDArray[np.int64]:
    """Where in the file each byte of a share comes from, as its strips say."""
    at = share.at
    parts = []
    for strip in share.strips:
        assert strip.at == at, "strips come to lie side by side"
        at += strip.nbytes
        starts = strip.begin + strip.stride * np.arange(strip.rows)
        parts.append((starts[:, None] + np.arange(strip.row_bytes)).ravel())
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def gathered(layer: Layer, plan: StageShare) -> dict[str, Array]:
    """What the strips bring, by the names of the tensors."""
    found: dict[str, Array] = {}
    for share in plan.shares:
        item = tiny.BITS[share.dtype] // 8
        data = layer.file[positions(share)].tobytes()
        stack = np.frombuffer(data, f"V{item}").reshape(len(share.names), *share.shape)
        found |= dict(zip(share.names, stack, strict=True))
    return found


def check(layer: Layer, ep: Rank, tp: Rank) -> None:
    wanted, found = expected(layer, ep, tp), gathered(layer, layer.plan(ep, tp))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


def ranks(size: int) -> list[Rank]:
    return [Rank(rank, size) for rank in range(size)]


# --- properties -----------------------------------------------------------------------------------


@st.composite
def layers(draw: st.DrawFn) -> tuple[Layer, int, int]:
    """A layer, and sizes of ep and tp that can divide it."""
    form = draw(st.sampled_from(sorted(FAMILY)))
    tp = draw(st.integers(1, 3))
    dtypes = ["BF16", "F32"] if form == "transposed" else ["BF16", "F32", "F8_E4M3"]
    dtype = draw(st.sampled_from(dtypes))
    block = (1, 1)
    if dtype == "F8_E4M3":
        block = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    # gate and up are cut by rows, down by columns: parts must have blocks of their own of both.
    unit = tp * int(np.lcm(*block)) if tp > 1 else 1
    hidden, inner = draw(st.integers(1, 12)), unit * draw(st.integers(1, 3))
    experts = draw(st.integers(1, 7))
    layer = Layer(
        form,
        experts,
        hidden,
        inner,
        shared=unit * draw(st.integers(0, 2)),
        dtype=dtype,
        block=block,
        seed=draw(st.one_of(st.none(), st.integers(0, 99))),
    )
    return layer, draw(st.integers(1, experts)), tp


@given(layers())
def test_strips_bring_what_slicing_gives(drawn: tuple[Layer, int, int]) -> None:
    layer, ep_size, tp_size = drawn
    for ep in ranks(ep_size):
        for tp in ranks(tp_size):
            check(layer, ep, tp)


@given(layers())
def test_ranks_together_hold_every_byte_of_the_experts_once(drawn: tuple[Layer, int, int]) -> None:
    """The shared expert once in each ep rank, all else in every rank."""
    layer, ep_size, tp_size = drawn
    count = np.zeros(len(layer.file), np.int64)
    for ep in ranks(ep_size):
        for tp in ranks(tp_size):
            for share in layer.plan(ep, tp).shares:
                np.add.at(count, positions(share), 1)
    assert not count[:BEGIN].any()
    for tensor in layer.tensors:
        times = ep_size * tp_size
        if tensor.name.startswith(f"{MLP}experts."):
            times = 1
        elif tensor.name.startswith(f"{MLP}shared_expert."):
            times = ep_size
        assert (count[tensor.begin : tensor.end] == times).all(), tensor.name


@given(layers())
def test_buffers_do_not_overlap_and_are_aligned(drawn: tuple[Layer, int, int]) -> None:
    layer, ep_size, tp_size = drawn
    for ep, tp in ((Rank(0, ep_size), Rank(0, tp_size)), (Rank(ep_size - 1, ep_size), WHOLE)):
        plan = layer.plan(ep, tp)
        end = 0
        for share in plan.shares:
            assert share.at % ALIGNMENT == 0
            assert end <= share.at < end + ALIGNMENT
            end = share.at + share.nbytes
        assert plan.buffer_bytes() == {"file": end}


@given(layers())
def test_a_rank_holds_a_range_of_experts(drawn: tuple[Layer, int, int]) -> None:
    """All of them in turn; none has more than one expert more than another."""
    layer, ep_size, _ = drawn
    held = [layer.plan(ep).modules[f"{MLP}experts"].here for ep in ranks(ep_size)]
    assert [expert for here in held for expert in here] == list(range(layer.experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert {m.num_experts for m in layer.plan().modules.values()} == {layer.experts}


# --- one by one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("fused", "BF16"),
        ("fused", "F8_E4M3"),
        ("transposed", "BF16"),
        ("per_expert", "BF16"),
        ("per_expert", "F8_E4M3"),
    ],
)
def test_what_lies_together_is_one_strip(form: str, dtype: str) -> None:
    """Hundreds of tensors of a run are read at once; cut ones are one strip with gaps."""
    layer = Layer(form, 8, 32, 24, 16, dtype=dtype, block=(4, 4))
    for ep in (WHOLE, Rank(1, 3)):
        for share in layer.plan(ep).shares:
            assert len(share.strips) == 1 and share.strips[0].is_range
    for share in layer.plan(Rank(1, 3), Rank(1, 2)).shares:
        assert len(share.strips) == 1


def test_what_does_not_lie_together_is_put_together() -> None:
    """A run keeps the order of the bundle format, wherever its tensors lie in the file."""
    layer = Layer("per_expert", 8, 32, 24, 0, seed=3)
    shares = {len(share.names): share for share in layer.plan().shares}
    gate_up, down = shares[16], shares[8]
    assert len(gate_up.strips) > 1 and len(down.strips) > 1
    names = [f"{MLP}experts.{e}.{p}_proj.weight" for e in range(8) for p in ("gate", "up")]
    assert gate_up.names == tuple(names)
    check(layer, Rank(1, 3), Rank(1, 2))


def test_a_run_that_is_spread_over_files() -> None:
    layer = Layer("per_expert", 4, 8, 4, 0)
    there = [
        TensorInfo(t.name, t.dtype, t.shape, t.begin, t.end, "b" if ".2." in t.name else "a")
        for t in layer.tensors
    ]
    for share in plan_share([there], WHOLE, WHOLE, None).shares:
        of = {tensor.name: tensor.file for tensor in there}
        files = [of[name] for name in share.names]
        changes = 1 + sum(one != two for one, two in pairwise(files))
        assert [strip.file for strip in share.strips] == ["a", "b", "a"][:changes]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FAMILY)
def test_more_ranks_than_experts(form: str) -> None:
    layer = Layer(form, 3, 8, 4, 0)
    with pytest.raises(UsageError, match=r"3 experts cannot be divided among 4 ranks"):
        layer.plan(Rank(0, 4))
    assert layer.plan(Rank(0, 3))


@pytest.mark.parametrize("form", FAMILY)
def test_rows_that_cannot_be_divided(form: str) -> None:
    layer = Layer(form, 2, 8, 6, 0)
    with pytest.raises(UsageError, match="its 6 rows or columns cannot be divided among 4 ranks$"):
        layer.plan(WHOLE, Rank(0, 4))
    with pytest.raises(UsageError, match="shared_expert.*its 10 rows or columns cannot be divided"):
        Layer(form, 2, 8, 6, 10).plan(WHOLE, Rank(0, 3))


@pytest.mark.parametrize("block", [(4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("form", ["fused", "per_expert"])
def test_fp8_is_cut_between_blocks(form: str, block: tuple[int, int]) -> None:
    """6 rows of 12 would begin within a block; so would 6 columns."""
    layer = Layer(form, 2, 8, 12, 0, dtype="F8_E4M3", block=block)
    with pytest.raises(UsageError, match="12 rows or columns .* 2 ranks in multiples of 4"):
        layer.plan(WHOLE, Rank(0, 2))
    check(layer, WHOLE, Rank(1, 3))


def test_scales_that_end_within_a_block_are_held_whole() -> None:
    """10 rows in blocks of 4: two and a half. Experts can be divided all the same."""
    layer = Layer("per_expert", 5, 6, 10, 10, dtype="F8_E4M3", block=(4, 4))
    for ep in ranks(2):
        check(layer, ep, WHOLE)


def test_what_tp_cannot_divide() -> None:
    """Other formats, or shapes that contradict config.json: nobody knows what the rows are."""
    layer = Layer("per_expert", 4, 8, 6, 8, dtype="F8_E5M2")
    with pytest.raises(WeightsError, match="F8_E5M2"):
        layer.plan(WHOLE, Rank(0, 2))
    layer = Layer("fused", 4, 8, 6, 0)
    with pytest.raises(WeightsError, match="fit neither each other nor config.json"):
        plan_share([layer.tensors], WHOLE, Rank(0, 2), Layer("fused", 4, 8, 12, 0).config)


def test_a_shared_expert_in_another_form() -> None:
    layer = Layer("fused", 4, 8, 6, 8)
    for dtype, axes in (("U8", 2), ("BF16", 1)):
        others = [
            TensorInfo(t.name, dtype, t.shape[-axes:], t.begin, t.end, "f")
            for t in layer.tensors
            if "shared" in t.name
        ]
        with pytest.raises(WeightsError, match=f"tensor parallelism cannot divide {dtype}"):
            plan_share([others], WHOLE, Rank(0, 2), layer.config)


def test_no_expert() -> None:
    layer = Layer("fused", 0, 8, 6, 0)
    check(layer, WHOLE, WHOLE)
    with pytest.raises(UsageError, match="0 experts cannot be divided"):
        layer.plan(Rank(0, 2))


# --- these tests would notice ---------------------------------------------------------------------


def test_a_cut_across_gate_and_up_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`[gate; up]` cut in one piece gives rank 0 all of gate, and rank 1 all of up."""
    layer = Layer("fused", 3, 8, 4, 0)
    check(layer, WHOLE, Rank(0, 2))
    axes = share_module._AXES
    monkeypatch.setattr(share_module, "_AXES", {**axes, ("fused", "gate_up"): (1, 1)})
    with pytest.raises(AssertionError):
        check(layer, WHOLE, Rank(0, 2))


def test_another_axis_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("transposed", 3, 8, 4, 0)
    check(layer, WHOLE, Rank(0, 2))
    axes = share_module._AXES
    monkeypatch.setattr(share_module, "_AXES", {**axes, ("fused_transposed", "down"): (2, 1)})
    with pytest.raises(AssertionError):
        check(layer, WHOLE, Rank(0, 2))
