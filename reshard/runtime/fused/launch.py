"""The experts by reshard's own kernels: buffers, grids and launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import reshard.runtime.fused.triton_kernels as kernels
from reshard.runtime.experts import ExpertWeights
from reshard.runtime.fused.tiles import Kind, Tile, Tiles, choose_tiles

_CHUNK = 64
"""Slots that one program sorts."""

_DESCRIBED = 32
"""Blocks that one program describes."""

_ADDED_CHUNKS, _ADDED_EXPERTS = 128, 32
"""What one program adds up at a time."""

_FEWEST_BINS = 64
"""A histogram has one bin for each thread of a warp, or more."""

_COMBINED = 1024
"""Columns of the output that one program adds up."""

_UNSORTED = 4
"""With so many experts for each slot, or more, slots are not sorted: most are alone anyway."""


class Blocks(NamedTuple):
    """Slots by expert: block b is `begin[b]` to `end[b]` of `sorted_slots`, all of `expert[b]`.

    expert, begin, end: `[max_blocks]`, an upper bound; the blocks that are not needed are empty.
    Without sorting there are no tensors, and each slot is a block.
    """

    max_blocks: int
    sorted_slots: Tensor | None = None
    expert: Tensor | None = None
    begin: Tensor | None = None
    end: Tensor | None = None


def triton_experts(
    hidden: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """See `fused_experts`. hidden is contiguous and not empty, topk_weights are float32."""
    capability = (9, 0)  # what the interpreter stands for
    if hidden.device.type == "cuda":
        capability = torch.cuda.get_device_capability(hidden.device)
    kind: Kind = "float32" if hidden.dtype == torch.float32 else "16-bit"
    if experts.block is not None:
        kind = "fp8"
    slots = topk_ids.numel()
    tiles = choose_tiles(slots / experts.num_local_experts, capability, kind)
    is_sorted = slots * _UNSORTED > experts.num_local_experts
    return run_tiles(hidden, experts, topk_ids, topk_weights, tiles, is_sorted=is_sorted)


def run_tiles(
    hidden: Tensor,
    experts: ExpertWeights,
    topk_ids: Tensor,
    topk_weights: Tensor,
    tiles: Tiles,
    *,
    is_sorted: bool,
) -> Tensor:
    """The same with these tiles, sorted or not: all ways give the same sums up to rounding."""
    topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
    slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    hidden_size, inner_size = experts.hidden_size, experts.intermediate_size
    inner = hidden.new_empty(slots, inner_size)
    parts = hidden.new_empty(slots, hidden_size)
    out = torch.empty_like(hidden)
    with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
        blocks = Blocks(slots)
        if is_sorted:
            blocks = sort_slots(topk_ids, experts, block_m=tiles.gate_up.block_m)
        common = {
            "topk_ids": topk_ids,
            "sorted_slots": blocks.sorted_slots,
            "block_expert": blocks.expert,
            "block_begin": blocks.begin,
            "block_end": blocks.end,
            "max_blocks": blocks.max_blocks,
            "first_expert": experts.first_expert,
            "num_experts": experts.num_local_experts,
            "hidden_size": hidden_size,
            "inner_size": inner_size,
        }
        kernels.gate_up[_grid(tiles.gate_up, blocks, inner_size)](
            x=hidden,
            w13=experts.w13,
            scale=experts.w13_scale,
            inner=inner,
            top_k=top_k,
            **common,
            **_strides("stride", "enk", experts.w13),
            **_strides("scale_stride", ("e", "half", "n", "k"), experts.w13_scale),
            **_constants(tiles.gate_up, experts, inner_size, hidden_size, is_sorted),
        )
        kernels.down[_grid(tiles.down, blocks, hidden_size)](
            inner=inner,
            w2=experts.w2,
            scale=experts.w2_scale,
            topk_weights=topk_weights,
            parts=parts,
            **common,
            **_strides("stride", "enk", experts.w2),
            **_strides("scale_stride", "enk", experts.w2_scale),
            **_constants(tiles.down, experts, hidden_size, inner_size, is_sorted),
        )
        kernels.combine[hidden.shape[0], -(-hidden_size // _COMBINED)](
            parts=parts,
            topk_ids=topk_ids,
            out=out,
            first_expert=experts.first_expert,
            num_experts=experts.num_local_experts,
            hidden_size=hidden_size,
            TOP_K=top_k,
            BLOCK_N=_COMBINED,
        )
    return out


def sort_slots(topk_ids: Tensor, experts: ExpertWeights, *, block_m: int) -> Blocks:
    """Slots by expert, in blocks of up to `block_m`; those of other ranks' experts in none."""
    slots, num_experts = topk_ids.numel(), experts.num_local_experts
    chunks = -(-slots // _CHUNK)
    # Each expert that gets any slots has at most one block that is not full.
    max_blocks = slots // block_m + min(slots, num_experts)
    bins = max(_FEWEST_BINS, 1 << num_experts.bit_length())
    ints = partial(torch.empty, dtype=torch.int32, device=topk_ids.device)
    counts, totals, sorted_slots = ints(chunks, bins), ints(bins), ints(slots)
    expert, begin, end = ints(max_blocks), ints(max_blocks), ints(max_blocks)
    common = {
        "topk_ids": topk_ids,
        "counts": counts,
        "num_slots": slots,
        "first_expert": experts.first_expert,
        "num_experts": num_experts,
        "CHUNK": _CHUNK,
        "EXPERTS": bins,
    }
    kernels.count_slots[chunks,](**common)
    kernels.add_counts[bins // _ADDED_EXPERTS,](
        counts=counts,
        totals=totals,
        num_chunks=chunks,
        EXPERTS=bins,
        ROWS=_ADDED_CHUNKS,
        COLUMNS=_ADDED_EXPERTS,
    )
    kernels.place_slots[max(chunks, -(-max_blocks // _DESCRIBED)),](
        totals=totals,
        sorted_slots=sorted_slots,
        block_expert=expert,
        block_begin=begin,
        block_end=end,
        num_chunks=chunks,
        max_blocks=max_blocks,
        BLOCK_M=block_m,
        BLOCKS=_DESCRIBED,
        **common,
    )
    return Blocks(max_blocks, sorted_slots, expert, begin, end)


def _grid(tile: Tile, blocks: Blocks, columns: int) -> tuple[int]:
    """A program for each block and `block_n` columns."""
    return (blocks.max_blocks * -(-columns // tile.block_n),)


def _constants(
    tile: Tile, experts: ExpertWeights, columns: int, depth: int, is_sorted: bool
) -> dict[str, int | bool]:
    """What a product of `columns` columns, summed over `depth`, is compiled for."""
    scale_rows, block_k = experts.block or (1, tile.block_k)
    return {
        "SORTED": is_sorted,
        "EVEN_N": columns % tile.block_n == 0,
        "EVEN_K": depth % block_k == 0,
        "FP8": experts.block is not None,
        "SCALE_ROWS": scale_rows,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,  # triton is to change its default
    }


def _strides(prefix: str, axes: Sequence[str], tensor: Tensor | None) -> dict[str, int]:
    """The strides of a tensor as arguments; zeros for scales that are not there."""
    strides = [0] * len(axes) if tensor is None else tensor.stride()
    return {f"{prefix}_{axis}": stride for axis, stride in zip(axes, strides, strict=True)}
