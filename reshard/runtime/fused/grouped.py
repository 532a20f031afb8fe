"""The experts by torch's grouped matrix product: the default on the CPU, a fallback on CUDA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reshard.runtime.experts import ExpertWeights


def grouped_experts(
    hidden: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """See `fused_experts`. Products are rounded to the dtype of `hidden`; sums are in float32."""
    tokens, top_k = topk_ids.shape
    count = experts.num_local_experts
    local = (topk_ids.flatten() - experts.first_expert).long()
    absent = (local < 0) | (local >= count)
    local = local.masked_fill(absent, count)  # sorted behind all that are here
    order = torch.argsort(local, stable=True)
    sizes = torch.zeros(count + 1, dtype=torch.int32, device=hidden.device)
    sizes.scatter_add_(0, local, torch.ones_like(local, dtype=torch.int32))
    ends = sizes[:count].cumsum(0, dtype=torch.int32)

    gate, up = F.grouped_mm(hidden[order // top_k], experts.w13.transpose(1, 2), offs=ends).chunk(
        2, dim=-1
    )
    y = F.grouped_mm(F.silu(gate) * up, experts.w2.transpose(1, 2), offs=ends)
    # Rows behind the last end were never written: whatever is there, even a NaN, must not count.
    y = y.masked_fill(absent[order, None], 0)
    slots = torch.empty_like(y)
    slots[order] = y
    weights = topk_weights.float().masked_fill(absent.view(tokens, top_k), 0)
    weighted = slots.view(tokens, top_k, -1).float() * weights[..., None]
    return weighted.sum(1).to(hidden.dtype)


def grouped_refusal(hidden: Tensor, experts: ExpertWeights) -> str | None:
    """Why `F.grouped_mm` cannot do it; None if it can. Its rules, from ATen/native/GroupedMMUtils.h."""
    if experts.block is not None:
        return "torch's grouped matrix product has no FP8 in blocks"
    if hidden.dtype != experts.w13.dtype:
        return f"hidden states are {hidden.dtype}, weights {experts.w13.dtype}"
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"torch's grouped matrix product does not take {hidden.dtype}"
    if hidden.device.type == "cuda":
        if hidden.dtype != torch.bfloat16:
            return "on CUDA, torch's grouped matrix product takes bfloat16 only"
        if torch.cuda.get_device_capability(hidden.device) < (8, 0):
            return "torch's grouped matrix product needs compute capability 8.0"
    lengths = {experts.hidden_size, experts.intermediate_size}
    lengths |= {*experts.w13.stride(), *experts.w2.stride()} - {1}
    if any(length * hidden.element_size() % 16 for length in lengths):
        return "torch's grouped matrix product needs rows in multiples of 16 bytes"
    return None
