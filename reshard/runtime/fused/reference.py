"""The experts one after the other: slow, exact, on any device. What the other backends are tested by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reshard.runtime.experts import ExpertWeights


def reference_experts(
    hidden: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """See `fused_experts`. Computes in float64 for hidden states in float64, else in float32.

    What lies between is not rounded to the dtype of `hidden`, so this is what the others approximate.
    Weights are converted, and FP8 ones dequantised, one expert at a time.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    x, weights = hidden.to(dtype), topk_weights.to(dtype)
    out = torch.zeros_like(x)
    local = topk_ids - experts.first_expert
    for expert in range(experts.num_local_experts):
        tokens, slots = torch.where(local == expert)
        if tokens.numel() == 0:
            continue
        w13, w2 = expert_matrices(experts, expert, dtype)
        gate, up = F.linear(x[tokens], w13).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w2)
        out.index_add_(0, tokens, y * weights[tokens, slots, None])
    return out.to(hidden.dtype)


def expert_matrices(
    experts: ExpertWeights, expert: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """w13 `[2I, H]` and w2 `[H, I]` of one expert (its place here), scaled, in `dtype`."""
    w13, w2 = experts.w13[expert].to(dtype), experts.w2[expert].to(dtype)
    if experts.w13_scale is None or experts.w2_scale is None or experts.block is None:
        return w13, w2
    inner = experts.intermediate_size
    halves = [
        dequantised(w13[half * inner : (half + 1) * inner], scale, experts.block)
        for half, scale in enumerate(experts.w13_scale[expert])
    ]
    return torch.cat(halves), dequantised(w2, experts.w2_scale[expert], experts.block)


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Each block of a matrix times its scale; the last one of a row or column may be smaller."""
    scale = scale.to(weight.dtype)
    for axis in (0, 1):
        size = weight.shape[axis]
        scale = scale.repeat_interleave(min(block[axis], size), axis).narrow(axis, 0, size)
    return weight * scale
