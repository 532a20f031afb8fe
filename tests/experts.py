"""Small experts with numbers in them, the definition of what they compute, and the parts of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from reshard.runtime import ExpertWeights

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
FP8 = torch.float8_e4m3fn
HIDDEN, INNER, EXPERTS = 72, 40, 6


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def make(
    dtype: torch.dtype = F32,
    *,
    transposed: bool = False,
    experts: int = EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INNER,
) -> ExpertWeights:
    """Whole experts whose output is of the order of 1. transposed: as Qwen3-VL releases lie."""
    w13 = (random(experts, 2 * inner, hidden, seed=1) / hidden**0.5).to(dtype)
    w2 = (random(experts, hidden, inner, seed=2) / (inner / 4) ** 0.5).to(dtype)
    if transposed:
        w13, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w13, w2))
        assert w13.stride(1) == w2.stride(1) == 1
    return ExpertWeights(w13, w2, None, None, None, 0, experts)


def make_fp8(
    block: tuple[int, int], inner: int = INNER, scales: torch.dtype = F32
) -> ExpertWeights:
    """Experts in FP8; neighbouring scales differ by a factor of up to 20."""
    rows, columns = -(-inner // block[0]), -(-HIDDEN // block[1])
    down = EXPERTS, -(-HIDDEN // block[0]), -(-inner // block[1])
    whole = make(inner=inner)
    return replace(
        whole,
        w13=(whole.w13 * 8).to(FP8),
        w2=(whole.w2 * 8).to(FP8),
        w13_scale=(random(EXPERTS, 2, rows, columns, seed=3).sigmoid() / 3 + 0.02).to(scales),
        w2_scale=(random(*down, seed=4).sigmoid() / 3 + 0.02).to(scales),
        block=block,
    )


def halves(w13: Tensor) -> Tensor:
    """gate and up apart: `[E, 2, I, H]`, a view."""
    return w13.view(len(w13), 2, -1, w13.shape[-1])


def states(tokens: int, dtype: torch.dtype = F32, hidden: int = HIDDEN) -> Tensor:
    return random(tokens, hidden, seed=5).to(dtype)


def routing(tokens: int, experts: int = EXPERTS, top_k: int = 4) -> tuple[Tensor, Tensor]:
    weights, ids = random(tokens, experts, seed=6).softmax(-1).topk(top_k)
    return ids, (weights / weights.sum(-1, keepdim=True)).float()


def loop(hidden: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The definition: float64, one token and one expert at a time."""
    hidden, w13, w2, weights = (tensor.double() for tensor in (hidden, w13, w2, weights))
    out = torch.zeros_like(hidden)
    for token, x in enumerate(hidden):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if 0 <= expert < len(w2):
                gate, up = w13[expert, : w2.shape[2]] @ x, w13[expert, w2.shape[2] :] @ x
                out[token] += weight * (w2[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return out


def off(found: Tensor, expected: Tensor) -> float:
    """The relative error, by the Euclidean norm."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def dequantised(experts: ExpertWeights) -> tuple[Tensor, Tensor]:
    """w13 and w2 in float64: every element has a scale, that of its block."""
    assert experts.block and experts.w13_scale is not None and experts.w2_scale is not None
    rows, columns = experts.block
    inner = experts.intermediate_size
    row, column = torch.arange(inner) // rows, torch.arange(HIDDEN) // columns
    w13 = halves(experts.w13.double()) * experts.w13_scale.double()[:, :, row[:, None], column]
    row, column = torch.arange(HIDDEN) // rows, torch.arange(inner) // columns
    w2 = experts.w2.double() * experts.w2_scale.double()[:, row[:, None], column]
    return w13.flatten(1, 2), w2


def of_rank(whole: ExpertWeights, rank: int, size: int) -> ExpertWeights:
    """Its experts, under expert parallelism."""
    first, end = (whole.num_experts * n // size for n in (rank, rank + 1))
    w13, w2, w13_scale, w2_scale = (
        tensor if tensor is None else tensor[first:end]
        for tensor in (whole.w13, whole.w2, whole.w13_scale, whole.w2_scale)
    )
    assert w13 is not None and w2 is not None
    return ExpertWeights(w13, w2, w13_scale, w2_scale, whole.block, first, whole.num_experts)


def of_tp_rank(whole: ExpertWeights, rank: int, size: int) -> ExpertWeights:
    """Its rows of gate, its rows of up, and its columns of down; scales likewise."""

    def cut(w13: Tensor, w2: Tensor, unit: int) -> tuple[Tensor, Tensor]:
        part = slice(rank * width // unit, (rank + 1) * width // unit)
        return w13[:, :, part], w2[:, :, part]

    width = whole.intermediate_size // size
    w13, w2 = cut(halves(whole.w13), whole.w2, 1)
    part = replace(whole, w13=w13.flatten(1, 2), w2=w2)
    if whole.block and whole.w13_scale is not None and whole.w2_scale is not None:
        assert width % whole.block[0] == 0 and whole.block[0] == whole.block[1]
        scales = cut(whole.w13_scale, whole.w2_scale, whole.block[0])
        part = replace(part, w13_scale=scales[0], w2_scale=scales[1])
    return part
