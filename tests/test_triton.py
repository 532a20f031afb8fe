"""The Triton kernels, in Triton's interpreter: the same code that a GPU runs, without a GPU.

What this cannot show: races, shared memory, speed. `test_triton_compile.py` looks at what compilers
make of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reshard.runtime import ExpertWeights
from reshard.runtime.fused import launch
from reshard.runtime.fused import triton_kernels as kernels
from reshard.runtime.fused.launch import run_tiles, sort_slots, triton_experts
from reshard.runtime.fused.tiles import Tile, Tiles, choose_tiles
from tests.experts import (
    BF16,
    EXPERTS,
    F16,
    F32,
    F64,
    FP8,
    HIDDEN,
    INNER,
    dequantised,
    halves,
    loop,
    make,
    make_fp8,
    of_rank,
    of_tp_rank,
    off,
    random,
    routing,
    states,
)
from tests.triton_interpreter import correct_interpreter

LIMITS = {F32: 1e-6, F16: 2e-3, BF16: 5e-3}
"""Relative errors. Measured: 2e-7, 4e-4, 3e-3."""

LIMITS_FP8 = {F32: 1e-6, F16: 1e-3, BF16: 3e-3}
"""Against the loop that rounds activations to FP8 as well."""

LIMIT_FP8_EXACT = 6e-2
"""Against the loop that does not."""


# numpy's word on a habit of triton 3.6
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim:DeprecationWarning"
)


@pytest.fixture(autouse=True, scope="module")
def interpreter(one_thread: None) -> None:
    correct_interpreter()


def tile(block_m: int = 16, block_n: int = 64, block_k: int = 32) -> Tiles:
    one = Tile(block_m, block_n, block_k, num_warps=4, num_stages=2)
    return Tiles(one, one)


def run(
    hidden: Tensor,
    experts: ExpertWeights,
    ids: Tensor,
    weights: Tensor,
    tiles: Tiles | None = None,
    *,
    is_sorted: bool = True,
) -> Tensor:
    return run_tiles(hidden, experts, ids, weights, tiles or tile(), is_sorted=is_sorted)


# --- the interpreter ------------------------------------------------------------------------------


@triton.jit
def _product(a, b, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    y = tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j))
    tl.store(out + i * N + j, y.to(out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_the_interpreter_multiplies_and_rounds_as_gpus_do(dtype: torch.dtype) -> None:
    a, b = (random(16, 16, seed=seed).to(dtype) for seed in (1, 2))
    out = torch.empty(16, 16, dtype=dtype)
    _product[1,](a, b, out, N=16)
    exact = (a.double() @ b.double()).to(dtype)
    assert off(out, exact) < (1e-6 if dtype == F32 else 1e-4)


def some(num_experts: int, first_expert: int = 0) -> ExpertWeights:
    """So many experts, whatever they are."""
    whole = make(experts=num_experts, hidden=1, inner=1)
    return replace(whole, first_expert=first_expert)


# --- sorting --------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    st.lists(st.integers(-2, 9), min_size=1, max_size=200),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from([16, 32]),
)
def test_slots_are_sorted_into_blocks(
    ids: list[int], num_experts: int, first: int, block_m: int
) -> None:
    """Every slot of an expert that is here once, in order, in a block of its expert."""
    blocks = sort_slots(torch.tensor([ids]), some(num_experts, first), block_m=block_m)
    slots, experts, begins, ends = (t.tolist() for t in blocks[1:] if t is not None)
    assert len(experts) == blocks.max_blocks
    seen: list[tuple[int, int]] = []
    row = 0
    for expert, begin, end in zip(experts, begins, ends, strict=True):
        assert 0 <= end - begin <= block_m
        if begin < end:
            assert begin == row
            row = end
            seen += [(expert, slot) for slot in slots[begin:end]]
    wanted = [(i - first, n) for n, i in enumerate(ids) if first <= i < first + num_experts]
    assert seen == sorted(wanted)


@pytest.mark.parametrize("num_experts", [128, 256, 512, 513])
def test_many_slots_and_experts_are_sorted(num_experts: int) -> None:
    """More chunks than one program adds up at a time, and as many experts as models have."""
    ids = torch.randint(num_experts, (1, 64 * 131), generator=torch.Generator().manual_seed(0))
    blocks = sort_slots(ids, some(num_experts), block_m=128)
    assert blocks.sorted_slots is not None and blocks.begin is not None and blocks.end is not None
    assert torch.equal(blocks.sorted_slots.long(), ids.flatten().argsort(stable=True))
    assert (blocks.end - blocks.begin).sum() == ids.numel()
    assert blocks.expert is not None
    for expert, begin, end in zip(blocks.expert, blocks.begin, blocks.end, strict=True):
        assert ids.flatten()[blocks.sorted_slots[begin:end].long()].eq(expert).all()


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 17])
@pytest.mark.parametrize("transposed", [False, True], ids=["fused", "transposed"])
@pytest.mark.parametrize("dtype", LIMITS)
def test_kernels_compute_what_the_loop_says(
    dtype: torch.dtype, transposed: bool, tokens: int
) -> None:
    experts, hidden = make(dtype, transposed=transposed), states(tokens, dtype)
    ids, weights = routing(tokens, top_k=3)
    expected = loop(hidden, experts.w13, experts.w2, ids, weights)
    for is_sorted in (True, False):
        out = run(hidden, experts, ids, weights, is_sorted=is_sorted)
        assert out.dtype == dtype
        assert off(out, expected) < LIMITS[dtype]


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 40), (3, 40), (40, 6)])
def test_tiles_are_chosen_by_the_batch(tokens: int, experts: int, id_dtype: torch.dtype) -> None:
    """Tiles, and whether slots are sorted, are chosen by the batch."""
    whole, (ids, weights) = make(BF16, experts=experts), routing(tokens, experts)
    hidden = states(tokens, BF16)
    out = triton_experts(hidden.contiguous(), whole, ids.to(id_dtype), weights)
    assert out.shape == hidden.shape and out.dtype == BF16
    assert off(out, loop(hidden, whole.w13, whole.w2, ids, weights)) < LIMITS[BF16]


@pytest.mark.parametrize(
    "tiles",
    [
        tile(16, 16, 64),
        tile(32, 64, 32),
        tile(64, 32, 128),
        tile(128, 128, 16),
        Tiles(Tile(16, 64, 64, 4, 3), Tile(16, 32, 16, 4, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("hidden_size", "inner"), [(72, 40), (64, 96), (33, 7)])
def test_any_tile_and_any_size(tiles: Tiles, hidden_size: int, inner: int) -> None:
    experts = make(hidden=hidden_size, inner=inner, transposed=inner == 96)
    hidden, (ids, weights) = states(21, hidden=hidden_size), routing(21)
    expected = loop(hidden, experts.w13, experts.w2, ids, weights)
    assert off(run(hidden, experts, ids, weights, tiles), expected) < LIMITS[F32]


def test_every_tile_of_the_table_is_chosen_for_some_batch() -> None:
    chosen = {
        (capability, kind, choose_tiles(rows, capability, kind))
        for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
        for kind in ("16-bit", "fp8", "float32")
        for rows in (0.1, 4, 5, 24, 25, 96, 97, 1e6)
    }
    assert all(tiles.gate_up.block_m == tiles.down.block_m for _, _, tiles in chosen)
    assert {tiles.gate_up.block_m for _, _, tiles in chosen} == {16, 32, 64, 128}


def test_equal_inputs_give_equal_bits() -> None:
    experts, hidden, (ids, weights) = make(BF16), states(17, BF16), routing(17)
    first = run(hidden, experts, ids, weights)
    assert torch.equal(run(hidden, experts, ids, weights), first)


# --- edges ----------------------------------------------------------------------------------------

SPREADS: dict[str, Callable[[int], Tensor]] = {
    "all on one expert": lambda k: torch.full((20, k), 3),
    "one token each": lambda k: torch.arange(20 * k).view(20, k) % EXPERTS,
    "the last expert alone": lambda k: torch.full((20, k), EXPERTS - 1),
    "the first and the last": lambda k: torch.arange(20 * k).view(20, k) % 2 * (EXPERTS - 1),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_however_tokens_are_spread(spread: str) -> None:
    experts, hidden, ids = make(), states(20), SPREADS[spread](2)
    weights = random(20, 2, seed=8).float()
    expected = loop(hidden, experts.w13, experts.w2, ids, weights)
    for is_sorted in (True, False):
        out = run(hidden, experts, ids, weights, is_sorted=is_sorted)
        assert off(out, expected) < LIMITS[F32]


@pytest.fixture
def nan_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated holds NaN, or absurd numbers: what is read must have been written."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda like: poisoned(like.shape, dtype=like.dtype))
    monkeypatch.setattr(
        Tensor, "new_empty", lambda like, *shape, **_: poisoned(*shape, dtype=like.dtype)
    )


@pytest.mark.usefixtures("nan_everywhere")
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_experts_that_are_elsewhere_add_exactly_nothing(
    dtype: torch.dtype, is_sorted: bool
) -> None:
    middle, hidden = of_rank(make(dtype), 1, 3), states(5, dtype)  # experts 2 and 3
    own = torch.tensor([[2, -1], [1, 3], [2, 3], [-1, 0], [4, 5]])
    weights = random(5, 2, seed=8).float()
    here = (own == 2) | (own == 3)
    out = run(hidden, middle, own, weights, is_sorted=is_sorted)
    assert off(out, loop(hidden, middle.w13, middle.w2, own - 2, weights)) < LIMITS[dtype]
    assert out[3:].eq(0).all()
    for elsewhere in (-1, 0, 4, EXPERTS, 10**9, -(2**40), 2**32 + 2):
        others = torch.where(here, own, elsewhere)
        scores = torch.where(here, weights, torch.nan)
        assert torch.equal(run(hidden, middle, others, scores, is_sorted=is_sorted), out)


@pytest.mark.usefixtures("nan_everywhere")
@pytest.mark.parametrize("is_sorted", [True, False])
def test_a_rank_without_tokens_gives_zeros(is_sorted: bool) -> None:
    last, ids = of_rank(make(), 2, 3), torch.tensor([[0, 1], [3, 2], [-1, -1]])
    out = run(states(3), last, ids, torch.ones(3, 2), is_sorted=is_sorted)
    assert torch.equal(out, torch.zeros(3, HIDDEN))


@pytest.mark.parametrize(("ep", "tp"), [(3, 1), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("transposed", [False, True], ids=["fused", "transposed"])
def test_all_ranks_sum_to_the_whole(ep: int, tp: int, transposed: bool) -> None:
    whole, hidden = make(inner=48, transposed=transposed), states(9)
    ids, weights = routing(9)
    parts = [of_tp_rank(of_rank(whole, r, ep), t, tp) for r in range(ep) for t in range(tp)]
    total = sum(run(hidden, part, ids, weights).double() for part in parts)
    assert isinstance(total, Tensor)
    assert off(total, loop(hidden, whole.w13, whole.w2, ids, weights)) < LIMITS[F32]


def test_offsets_between_experts_exceed_32_bits() -> None:
    """The last expert of a large layer begins beyond 2**31 elements, here of memory never touched."""
    experts, hidden, inner = 6, 32, 16
    stride = 2**31 // 5 + 1000  # rounded so that expert 5 begins beyond 2**31
    small = make(BF16, experts=experts, hidden=hidden, inner=inner)
    memory = torch.empty(5 * stride + 2 * inner * hidden, dtype=BF16)
    assert 5 * stride > 2**31
    w13 = memory.as_strided((experts, 2 * inner, hidden), (stride, hidden, 1))
    w13[0], w13[5] = small.w13[0], small.w13[5]
    memory2 = torch.empty(5 * stride + inner * hidden, dtype=BF16)
    w2 = memory2.as_strided((experts, hidden, inner), (stride, inner, 1))
    w2[0], w2[5] = small.w2[0], small.w2[5]
    far = replace(small, w13=w13, w2=w2)
    x, ids = states(3, BF16, hidden=hidden), torch.tensor([[5, 0], [0, 5], [5, 5]])
    weights = torch.ones(3, 2)
    for is_sorted in (True, False):
        assert torch.equal(
            run(x, far, ids, weights, is_sorted=is_sorted),
            run(x, small, ids, weights, is_sorted=is_sorted),
        )


# --- FP8 in blocks --------------------------------------------------------------------------------


def in_groups(x: Tensor, group: int) -> Tensor:
    """Rows rounded to FP8 as the kernels do: in groups of columns, with a scale each; in float64."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % group))
    parts = padded.view(len(x), -1, group)
    largest = parts.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest / 448, 1)
    rounded = (parts / scale).to(FP8).double() * scale.double()
    return rounded.view(len(x), -1)[:, : x.shape[1]]


def fp8_loop(hidden: Tensor, experts: ExpertWeights, ids: Tensor, weights: Tensor) -> Tensor:
    """The definition with both activations in FP8."""
    w13, w2 = dequantised(experts)
    assert experts.block is not None
    out = torch.zeros_like(hidden, dtype=F64)
    for token, x in enumerate(in_groups(hidden, experts.block[1])):
        for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
            gate, up = halves(w13)[expert] @ x
            inner = (gate / (1 + torch.exp(-gate)) * up).to(hidden.dtype)
            out[token] += weight * (w2[expert] @ in_groups(inner[None], experts.block[1])[0])
    return out


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("block", [(16, 16), (16, 32), (32, 16), (128, 128)], ids=str)
def test_fp8_weights_run_in_blocks(block: tuple[int, int], dtype: torch.dtype) -> None:
    """H 72 and I 40 leave partial blocks, and the rows of up begin within one."""
    experts, hidden = make_fp8(block, scales=BF16), states(9, dtype)
    ids, weights = routing(9, top_k=2)
    exact = loop(hidden, *dequantised(experts), ids, weights)
    for is_sorted in (True, False):
        out = run(hidden, experts, ids, weights, is_sorted=is_sorted)
        assert off(out, fp8_loop(hidden, experts, ids, weights)) < LIMITS_FP8[dtype]
        assert off(out, exact) < LIMIT_FP8_EXACT


def test_tokens_of_zeros_stay_zeros_in_fp8() -> None:
    experts, (ids, weights) = make_fp8((16, 16)), routing(2)
    assert run(torch.zeros(2, HIDDEN, dtype=BF16), experts, ids, weights).eq(0).all()


# --- canaries: what must be seen ------------------------------------------------------------------

MISTAKES = {
    "gate and up swapped": (
        "y = gate / (1.0 + tl.exp(-gate)) * up",
        "y = up / (1.0 + tl.exp(-up)) * gate",
    ),
    "up begins where gate does": ("up_at = gate_at + inner_size * stride_n", "up_at = gate_at"),
    "no routing weight": ("y *= tl.load(topk_weights + slots)[:, None]", "pass"),
    "last slot dropped": ("tl.static_range(TOP_K)", "tl.static_range(TOP_K - 1)"),
    "tokens not gathered": ("(slots // top_k)[:, None]", "(rows // top_k)[:, None]"),
    "first expert's weights only": ("w2 + expert * stride_e", "w2 + 0 * stride_e"),
    "last columns of the sum left out": (
        "range(tl.cdiv(inner_size, BLOCK_K))",
        "range(inner_size // BLOCK_K)",
    ),
    "blocks begin at their own number": ("begin = tl.load(block_begin + block)", "begin = block"),
}
"""What is written in the kernels, and what is written there instead. None of it raises."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_kernel_is_far_above_the_limits(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = MISTAKES[mistake]
    source = Path(str(kernels.__file__)).read_text(encoding="utf-8")
    assert right in source
    (tmp_path / "wrong_kernels.py").write_text(source.replace(right, wrong), encoding="utf-8")
    spec = spec_from_file_location("wrong_kernels", tmp_path / "wrong_kernels.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    whole, hidden, (ids, weights) = make(), states(17), routing(17, top_k=2)
    expected = loop(hidden, whole.w13, whole.w2, ids, weights)
    assert off(run(hidden, whole, ids, weights), expected) < LIMITS[F32]
    monkeypatch.setattr(launch, "kernels", module)
    out = run(hidden, whole, ids, weights).nan_to_num(1e3)
    assert off(out, expected) > 0.1


def test_parts_that_are_no_parts_are_far_above_the_limits() -> None:
    """Half of [gate; up] is all of gate: tensor parallelism cuts both."""
    whole, hidden, (ids, weights) = make(), states(17), routing(17)
    parts = [
        replace(whole, w13=w13, w2=w2)
        for w13, w2 in zip(whole.w13.chunk(2, 1), whole.w2.chunk(2, 2), strict=True)
    ]
    total = sum(run(hidden, part, ids, weights) for part in parts)
    assert off(torch.as_tensor(total), loop(hidden, whole.w13, whole.w2, ids, weights)) > 1


def test_sizes_are_such_that_shapes_tell() -> None:
    assert HIDDEN not in (INNER, 2 * INNER)
