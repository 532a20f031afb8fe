"""`fused_experts` without a GPU: against a loop in float64, and against transformers' own experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3_5MoeTextConfig, Qwen3VLMoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextExperts

from reshard.errors import UsageError, WeightsError
from reshard.runtime import ExpertWeights, fused_experts
from reshard.runtime import fused as fused_module
from reshard.runtime.fused import Backend, choose_backend, triton_refusal
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

LIMITS: dict[tuple[Backend, torch.dtype], float] = {
    ("reference", F64): 1e-14,
    ("reference", F32): 1e-6,
    ("reference", F16): 4e-4,
    ("reference", BF16): 3e-3,
    ("grouped", F32): 1e-6,
    ("grouped", F16): 2e-3,
    ("grouped", BF16): 8e-3,
}
"""Relative errors. `reference` rounds the result alone."""

BOTH = pytest.mark.parametrize("backend", ["reference", "grouped"])


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the definition -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
@pytest.mark.parametrize("transposed", [False, True], ids=["fused", "transposed"])
@pytest.mark.parametrize(("backend", "dtype"), LIMITS)
def test_experts_are_what_the_loop_says(
    backend: Backend, dtype: torch.dtype, transposed: bool, tokens: int
) -> None:
    experts, hidden = make(dtype, transposed=transposed), states(tokens, dtype)
    ids, weights = routing(tokens)
    out = fused_experts(hidden, experts, ids, weights, backend)
    assert out.dtype == dtype
    expected = loop(hidden, experts.w13, experts.w2, ids, weights)
    assert off(out, expected) < LIMITS[backend, dtype]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize(
    ("module", "config"),
    [
        (Qwen3_5MoeExperts, Qwen3_5MoeTextConfig),
        (Qwen3VLMoeTextExperts, Qwen3VLMoeTextConfig),
    ],
    ids=["qwen3_5", "qwen3_vl"],
)
@BOTH
def test_experts_are_those_of_transformers(
    module: Any, config: Any, implementation: str, dtype: torch.dtype, backend: Backend
) -> None:
    experts, hidden = make(dtype), states(33, dtype)
    ids, weights = routing(33)
    settings = config(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS)
    settings._experts_implementation = implementation
    theirs = module(settings)
    state = {"gate_up_proj": experts.w13, "down_proj": experts.w2}
    theirs.load_state_dict(state, strict=True, assign=True)
    with torch.no_grad():
        expected = theirs(hidden, ids, weights.to(dtype))
    limit = 1e-6 if dtype == F32 else 8e-3
    assert off(fused_experts(hidden, experts, ids, weights, backend), expected) < limit
    assert off(fused_experts(hidden, experts, ids, weights.to(dtype), backend), expected) < limit


@BOTH
def test_any_ids_and_any_view_will_do(backend: Backend) -> None:
    experts, wide = make(), random(17, 2 * HIDDEN, seed=7).float()
    hidden, before = wide[:, ::2], wide.clone()
    ids, weights = routing(17)
    plain = fused_experts(hidden.contiguous(), experts, ids, weights, backend)
    assert off(plain, loop(hidden, experts.w13, experts.w2, ids, weights)) < 1e-6
    assert torch.equal(fused_experts(hidden, experts, ids.int(), weights, backend), plain)
    turned_ids, turned_weights = (tensor.t().contiguous().t() for tensor in (ids, weights))
    turned = fused_experts(hidden, experts, turned_ids, turned_weights, backend)
    assert torch.equal(turned, plain)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_grouped_weighs_and_sums_in_float32(dtype: torch.dtype) -> None:
    """What each expert gives is rounded, then the sum, once: router weights are not, nor products."""
    experts, hidden = make(dtype), states(64, dtype)
    ids, weights = routing(64)
    one = torch.ones(64, 1)
    slots = [
        fused_experts(hidden, experts, chosen, one, "grouped") for chosen in ids.t()[..., None]
    ]
    exact = (torch.stack(slots, 1).double() * weights.double()[..., None]).sum(1)
    out = fused_experts(hidden, experts, ids, weights, "grouped")
    assert out.ne(exact.to(dtype)).double().mean() < 0.01


# --- FP8 in blocks --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
@pytest.mark.parametrize("scales", [F32, BF16])
@pytest.mark.parametrize("block", [(16, 16), (16, 32), (32, 16), (128, 128)])
def test_fp8_weights_are_scaled_block_by_block(
    block: tuple[int, int], scales: torch.dtype, dtype: torch.dtype
) -> None:
    experts, hidden = make_fp8(block, scales=scales), states(9, dtype)
    ids, weights = routing(9)
    out = fused_experts(hidden, experts, ids, weights)
    assert out.dtype == dtype
    expected = loop(hidden, *dequantised(experts), ids, weights)
    assert off(out, expected) < LIMITS["reference", dtype]


def test_rows_of_up_have_scales_of_their_own() -> None:
    """Rows 40 to 47 are up's first block; in blocks counted over [gate; up] they were gate's third."""
    experts, hidden = make_fp8((16, 16)), states(9, F64)
    ids, weights = routing(9)
    w13, w2 = dequantised(experts)
    out = fused_experts(hidden, experts, ids, weights)
    assert off(out, loop(hidden, w13, w2, ids, weights)) < 1e-14
    assert experts.w13_scale is not None
    row, column = torch.arange(2 * INNER) // 16, torch.arange(HIDDEN) // 16
    through = experts.w13.double() * experts.w13_scale.flatten(1, 2)[:, row[:, None], column]
    assert off(out, loop(hidden, through, w2, ids, weights)) > 0.2


# --- edges ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_no_token(backend: Backend, dtype: torch.dtype) -> None:
    ids, weights = routing(0)
    out = fused_experts(states(0, dtype), make(dtype), ids, weights, backend)
    assert out.shape == (0, HIDDEN) and out.dtype == dtype


SPREADS: dict[str, list[list[int]]] = {
    "all on the first": [[0]] * 9,
    "all on the last": [[EXPERTS - 1]] * 9,
    "all on the last, one slot": [[EXPERTS - 1]],
    "experts without tokens": [[1, 4], [4, 1], [1, 4]],
    "every expert": [list(range(EXPERTS))] * 3,
    "one expert twice": [[2, 2, 3], [3, 2, 2]],
}


@BOTH
@pytest.mark.parametrize("spread", SPREADS)
def test_however_tokens_are_spread(backend: Backend, spread: str) -> None:
    ids = torch.tensor(SPREADS[spread])
    weights = random(*ids.shape, seed=8).float()
    experts, hidden = make(), states(len(ids))
    out = fused_experts(hidden, experts, ids, weights, backend)
    assert off(out, loop(hidden, experts.w13, experts.w2, ids, weights)) < 1e-6


@pytest.mark.parametrize(("hidden", "inner"), [(33, 7), (1, 1), (37, 40), (72, 13)])
@pytest.mark.parametrize("transposed", [False, True], ids=["fused", "transposed"])
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
def test_odd_sizes_are_left_to_the_reference(
    dtype: torch.dtype, transposed: bool, hidden: int, inner: int
) -> None:
    experts = make(dtype, hidden=hidden, inner=inner, transposed=transposed)
    x, (ids, weights) = states(5, dtype, hidden), routing(5)
    assert choose_backend(x, experts, "auto") == "reference"
    out = fused_experts(x, experts, ids, weights)
    expected = loop(x, experts.w13, experts.w2, ids, weights)
    assert off(out, expected) < LIMITS["reference", dtype]


@pytest.fixture
def nan_behind(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """F.grouped_mm, but rows behind the last group are NaN: how many, call by call."""
    true, rows = torch.nn.functional.grouped_mm, []

    def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out = true(a, b, offs=offs).clone()
        out[int(offs[-1]) :] = torch.nan
        rows.append(int(out.isnan().any(-1).sum()))
        return out

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    return rows


@BOTH
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_experts_that_are_elsewhere_add_exactly_nothing(
    nan_behind: list[int], backend: Backend, dtype: torch.dtype, id_dtype: torch.dtype
) -> None:
    middle, hidden = of_rank(make(dtype), 1, 3), states(5, dtype)  # experts 2 and 3
    own = torch.tensor([[2, -1], [1, 3], [2, 3], [-1, 0], [4, 5]], dtype=id_dtype)
    weights = random(5, 2, seed=8).float()
    here = (own == 2) | (own == 3)

    out = fused_experts(hidden, middle, own, weights, backend)
    limit = LIMITS[backend, dtype]
    assert off(out, loop(hidden, middle.w13, middle.w2, own - 2, weights)) < limit
    assert out[3:].eq(0).all()
    assert backend == "reference" or nan_behind == [6, 6]
    for elsewhere in (-1, 0, 4, EXPERTS, 10**9):
        others = torch.where(here, own, elsewhere)
        for heavy in (1e30, torch.nan):
            scores = torch.where(here, weights, heavy)
            assert torch.equal(fused_experts(hidden, middle, others, scores, backend), out)


@BOTH
def test_a_rank_without_tokens_gives_zeros(nan_behind: list[int], backend: Backend) -> None:
    last, ids = of_rank(make(), 2, 3), torch.tensor([[0, 1], [3, 2], [-1, -1]])
    out = fused_experts(states(3), last, ids, torch.ones(3, 2), backend)
    assert torch.equal(out, torch.zeros(3, HIDDEN))
    assert backend == "reference" or nan_behind == [6, 6]


@BOTH
@given(st.integers(1, 5).flatmap(lambda k: st.lists(st.lists(st.integers(-2, 7), min_size=k,
       max_size=k), min_size=1, max_size=12)), st.integers(0, 2))  # fmt: skip
def test_ranks_and_ids_of_any_kind(backend: Backend, ids: list[list[int]], rank: int) -> None:
    experts, chosen = of_rank(make(), rank, 3), torch.tensor(ids)
    hidden, weights = states(len(ids)), random(*chosen.shape, seed=9).float()
    out = fused_experts(hidden, experts, chosen, weights, backend)
    expected = loop(hidden, experts.w13, experts.w2, chosen - experts.first_expert, weights)
    assert torch.allclose(out.double(), expected, rtol=1e-5, atol=1e-5)


# --- parts that sum to the whole ------------------------------------------------------------------


def summed(
    parts: list[ExpertWeights], hidden: Tensor, ids: Tensor, weights: Tensor, backend: Backend
) -> Tensor:
    return sum(
        (fused_experts(hidden, part, ids, weights, backend).double() for part in parts),
        start=torch.zeros_like(hidden, dtype=F64),
    )


WHOLES: dict[str, tuple[Backend, Callable[[], ExpertWeights]]] = {
    "reference": ("reference", lambda: make(inner=48)),
    "grouped": ("grouped", lambda: make(inner=48)),
    "transposed": ("grouped", lambda: make(inner=48, transposed=True)),
    "fp8": ("reference", lambda: make_fp8((16, 16), inner=48)),
}


@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (4, 1), (6, 1), (1, 3), (2, 3), (4, 3)])
@pytest.mark.parametrize("kind", WHOLES)
def test_all_ranks_sum_to_the_whole(kind: str, ep: int, tp: int) -> None:
    backend, made = WHOLES[kind]
    whole, hidden, (ids, weights) = made(), states(17), routing(17)
    ranks = [of_rank(whole, rank, ep) for rank in range(ep)]
    assert sum(len(rank.w2) for rank in ranks) == EXPERTS
    parts = [of_tp_rank(rank, part, tp) for rank in ranks for part in range(tp)]
    w13, w2 = dequantised(whole) if whole.block else (whole.w13, whole.w2)
    expected = loop(hidden, w13, w2, ids, weights)
    assert off(summed(parts, hidden, ids, weights, backend), expected) < 1e-6
    if len(parts) > 1:
        assert off(summed(parts[1:], hidden, ids, weights, backend), expected) > 0.1


@BOTH
def test_all_ranks_sum_to_the_whole_in_bfloat16(backend: Backend) -> None:
    whole, hidden, (ids, weights) = make(BF16), states(17, BF16), routing(17)
    parts = [of_tp_rank(of_rank(whole, r, 3), t, 5) for r in range(3) for t in range(5)]
    expected = loop(hidden, whole.w13, whole.w2, ids, weights)
    assert off(summed(parts, hidden, ids, weights, backend), expected) < LIMITS[backend, BF16]


# --- canaries: what must be seen ------------------------------------------------------------------


@BOTH
def test_mistakes_are_far_above_the_limits(backend: Backend) -> None:
    """Each is an easy mistake that raises nothing."""
    whole, hidden, (ids, weights) = make(), states(64), routing(64)
    expected = loop(hidden, whole.w13, whole.w2, ids, weights)
    swapped = halves(whole.w13).flip(1).flatten(1, 2)
    interleaved = halves(whole.w13).transpose(1, 2).flatten(1, 2)
    blind = replace(whole, first_expert=1)
    mistakes = {
        "gate and up swapped": ([replace(whole, w13=swapped)], ids, weights),
        "gate and up interleaved": ([replace(whole, w13=interleaved)], ids, weights),
        "uniform weights": ([whole], ids, torch.full_like(weights, 0.25)),
        "last slot dropped": ([whole], ids[:, :-1], weights[:, :-1]),
        "slots the wrong way round": ([whole], ids, weights.flip(1)),
        "numbered from one": ([blind], ids, weights),
        "experts as if contiguous parts were those of a rank": (
            [
                replace(whole, w13=w13, w2=w2)
                for w13, w2 in zip(whole.w13.chunk(2, 1), whole.w2.chunk(2, 2), strict=True)
            ],
            ids,
            weights,
        ),
    }
    found = {
        name: off(summed(parts, hidden, chosen, scores, backend), expected)
        for name, (parts, chosen, scores) in mistakes.items()
    }
    assert min(found.values()) > 0.1, found


# --- which backend --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "dtype", "chosen"),
    [
        (make(F32), F32, "grouped"),
        (make(BF16), BF16, "grouped"),
        (make(F16, transposed=True), F16, "grouped"),
        (make(F64), F64, "reference"),
        (make(BF16), F32, "reference"),
        (make(F32), BF16, "reference"),
        (make(BF16, hidden=68), BF16, "reference"),
        (make(F32, hidden=68), F32, "grouped"),
        (make(BF16, inner=44), BF16, "reference"),
        (make_fp8((16, 16)), BF16, "reference"),
    ],
)
def test_auto_takes_the_fastest_that_can(
    monkeypatch: pytest.MonkeyPatch, experts: ExpertWeights, dtype: torch.dtype, chosen: Backend
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # and yet never on the CPU
    hidden = states(3, dtype, experts.hidden_size)
    assert choose_backend(hidden, experts, "auto") == chosen
    ids, weights = routing(3)
    out = fused_experts(hidden, experts, ids, weights)
    named = fused_experts(hidden, experts, ids, weights, chosen)
    assert torch.equal(out, named)


@pytest.mark.parametrize(
    ("dtype", "block", "capability", "triton", "chosen"),
    [
        (BF16, None, (9, 0), True, "triton"),
        (F32, None, (8, 0), True, "triton"),
        (BF16, (16, 16), (8, 9), True, "triton"),
        (BF16, (16, 16), (8, 0), True, "reference"),
        (BF16, None, (7, 5), True, "reference"),
        (BF16, None, (9, 0), False, "grouped"),
        (F32, None, (9, 0), False, "reference"),
        (F64, None, (9, 0), True, "reference"),
    ],
)
def test_auto_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    block: tuple[int, int] | None,
    capability: tuple[int, int],
    triton: bool,
    chosen: str,
) -> None:
    """Decided by what the device says of itself; none is needed for that."""
    cuda = SimpleNamespace(type="cuda")
    hidden = SimpleNamespace(device=cuda, dtype=dtype, element_size=states(0, dtype).element_size)
    experts = make_fp8(block) if block else make(dtype)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("reshard.runtime.fused._triton_is_installed", lambda: triton)
    assert choose_backend(cast(Tensor, hidden), experts, "auto") == chosen


@pytest.mark.parametrize(
    ("backend", "experts", "dtype", "message"),
    [
        ("grouped", make_fp8((16, 16)), BF16, "no FP8 in blocks"),
        ("grouped", make(F64), F64, "does not take torch.float64"),
        ("grouped", make(BF16), F32, "hidden states are torch.float32, weights torch.bfloat16"),
        ("grouped", make(BF16, hidden=68), BF16, "rows in multiples of 16 bytes"),
        ("grouped", make(BF16, inner=44, transposed=True), BF16, "rows in multiples of 16 bytes"),
        ("triton", make(BF16), BF16, "the kernels need CUDA"),
    ],
)
def test_a_backend_that_cannot_run_says_why(
    monkeypatch: pytest.MonkeyPatch,
    backend: Backend,
    experts: ExpertWeights,
    dtype: torch.dtype,
    message: str,
) -> None:
    ids, weights = routing(2)
    start = f"the {backend} backend cannot run these experts: "
    with pytest.raises(WeightsError, match=f"^{start}.*{message}") as refused:
        fused_experts(states(2, dtype, experts.hidden_size), experts, ids, weights, backend)
    assert refused.value.hint == "choose another backend, or auto"


@pytest.mark.parametrize(
    ("experts", "dtype", "installed", "message"),
    [
        (make(BF16), BF16, False, "triton is not installed"),
        (make(F64), F64, True, "do not take torch.float64"),
        (make(BF16), F16, True, "hidden states are torch.float16, weights torch.bfloat16"),
        (make_fp8((16, 24)), BF16, True, "scales for 24 columns each"),
        (make_fp8((128, 128)), BF16, True, "compute capability 8.9 is needed"),
        (make_fp8((128, 128)), F64, True, "do not take torch.float64"),
        (make(BF16), BF16, True, None),
    ],
)
def test_why_the_kernels_cannot_run_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
    experts: ExpertWeights,
    dtype: torch.dtype,
    installed: bool,
    message: str | None,
) -> None:
    """On an A100: what it says of itself is all that is asked."""
    hidden = SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=dtype)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("reshard.runtime.fused._triton_is_installed", lambda: installed)
    refusal = triton_refusal(cast(Tensor, hidden), experts)
    assert refusal == message if message is None else message in str(refusal)


def test_slow_experts_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    experts, hidden, (ids, weights) = make(F64), states(2, F64), routing(2)
    fused_module._say_once.cache_clear()
    for _ in range(2):
        fused_experts(hidden, experts, ids, weights)
    (record,) = caplog.records
    assert record.getMessage() == (
        "experts run one after the other: the kernels need CUDA; torch's grouped matrix product "
        "does not take torch.float64"
    )


@pytest.mark.parametrize("backend", ["auto", "reference", "grouped"])
def test_no_expert_at_all(backend: Backend) -> None:
    nobody = of_rank(make(), 0, EXPERTS * 2)  # as 0 of 12 ranks has none of 6
    assert nobody.num_local_experts == 0
    out = fused_experts(states(3), nobody, *routing(3), backend)
    assert torch.equal(out, torch.zeros(3, HIDDEN))


def test_blocks_that_are_larger_than_the_matrix() -> None:
    """One scale for all: memory is that of the matrix, whatever config.json says."""
    huge = make_fp8((128, 128))
    vast = replace(huge, block=(10**9, 10**9))
    hidden, (ids, weights) = states(3, F64), routing(3)
    assert torch.equal(
        fused_experts(hidden, vast, ids, weights), fused_experts(hidden, huge, ids, weights)
    )


def test_an_unknown_backend() -> None:
    with pytest.raises(UsageError, match="'cutlass' is none of auto, reference, grouped, triton"):
        fused_experts(states(2), make(), *routing(2), cast(Backend, "cutlass"))


IDS, WEIGHTS = routing(2)
MISFITS: dict[str, tuple[Tensor, Tensor, Tensor, str]] = {
    "hidden size": (states(2, hidden=64), IDS, WEIGHTS, r"\(2, 64\), the experts take .*72"),
    "hidden axes": (states(2)[None], IDS, WEIGHTS, r"\(1, 2, 72\), the experts take"),
    "hidden dtype": (states(2).long(), IDS, WEIGHTS, "hidden states are torch.int64"),
    "hidden in fp8": (states(2).to(FP8), IDS, WEIGHTS, "hidden states are torch.float8_e4m3fn"),
    "tokens": (states(3), IDS, WEIGHTS, r"topk_ids are \(2, 4\) for 3 tokens"),
    "ids axes": (states(2), IDS[0], WEIGHTS[0], r"topk_ids are \(4,\) for 2 tokens"),
    "no slot": (states(2), IDS[:, :0], WEIGHTS[:, :0], r"topk_ids are \(2, 0\)"),
    "slots": (states(2), IDS, WEIGHTS[:, 1:], r"topk_ids are \(2, 4\), topk_weights \(2, 3\)"),
    "ids dtype": (states(2), IDS.float(), WEIGHTS, "topk_ids are torch.float32"),
    "ids int16": (states(2), IDS.short(), WEIGHTS, "must be int32 or int64"),
    "weights dtype": (states(2), IDS, IDS, "topk_weights torch.int64"),
    "hidden device": (states(2).to("meta"), IDS, WEIGHTS, "different devices: cpu, meta"),
    "ids device": (states(2), IDS.to("meta"), WEIGHTS, "different devices: cpu, meta"),
    "weights device": (states(2), IDS, WEIGHTS.to("meta"), "different devices: cpu, meta"),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("backend", ["auto", "reference", "grouped"])
def test_tensors_that_do_not_fit_together(backend: Backend, misfit: str) -> None:
    hidden, ids, weights, message = MISFITS[misfit]
    with pytest.raises(UsageError, match=message):
        fused_experts(hidden, make(), ids, weights, backend)


def test_weights_on_another_device() -> None:
    experts = make()
    with pytest.raises(UsageError, match="different devices: cpu, meta"):
        fused_experts(states(2), replace(experts, w2=experts.w2.to("meta")), IDS, WEIGHTS)
