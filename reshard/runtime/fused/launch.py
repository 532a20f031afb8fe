"""The experts by reshard's own kernels: buffers, grids and launches."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import reshard.runtime.fused.triton_kernels as kernels
from reshard.runtime.experts import ExpertWeights
from reshard.runtime.fused.tiles import Kind, Tile, Tiles, choose_tiles

_CHUNK = 64
"""Slots that one program sorts."""

_BLOCKS = 32
"""Blocks that one program describes."""

_ROWS, _COLUMNS = 128, 32
"""Chunks and experts that one program adds up at a time."""

_FEWEST_BINS = 64
"""A histogram has one bin for each thread of a warp, or more."""

_COMBINED = 1024
"""Columns of the output that one program adds up."""

_UNSORTED = 4
"""Up to one slot for so many experts, sorting does not pay: most experts would get one row."""


class Blocks(NamedTuple):
    """Slots by expert: block b is `begin[b]` to `end[b]` of `sorted_slots`, all of `expert[b]`.

    expert, begin, end: `[bound]`, an upper bound, the blocks that are not needed are empty.
    Without sorting there are no tensors, and each slot is a block.
    """

    sorted_slots: Tensor | None
    expert: Tensor | None
    begin: Tensor | None
    end: Tensor | None
    bound: int


def triton_experts(
    hidden: Tensor, experts: ExpertWeights, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    """See `fused_experts`. hidden is contiguous and not empty, topk_weights are float32."""
    count = experts.w2.shape[0]
    capability = (9, 0)
    if hidden.device.type == "cuda":
        capability = torch.cuda.get_device_capability(hidden.device)
    kind: Kind = "float32" if hidden.dtype == torch.float32 else "16-bit"
    if experts.block is not None:
        kind = "fp8"
    tiles = choose_tiles(topk_ids.numel() / count, capability, kind)
    is_sorted = topk_ids.numel() * _UNSORTED > count
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
    here = experts.first_expert, experts.w2.shape[0]
    inner = hidden.new_empty(slots, inner_size)
    parts = hidden.new_empty(slots, hidden_size)
    out = torch.empty_like(hidden)
    with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
        blocks = Blocks(None, None, None, None, slots)
        if is_sorted:
            blocks = sort_slots(topk_ids, *here, block_m=tiles.gate_up.block_m)
        grid, constants = _launch(tiles.gate_up, blocks, inner_size, hidden_size, experts.block)
        kernels.gate_up[grid](
            hidden,
            experts.w13,
            experts.w13_scale,
            inner,
            topk_ids,
            *blocks,
            *here,
            top_k,
            hidden_size,
            inner_size,
            *experts.w13.stride(),
            *_strides(experts.w13_scale, 4),
            **constants,
        )
        grid, constants = _launch(tiles.down, blocks, hidden_size, inner_size, experts.block)
        kernels.down[grid](
            inner,
            experts.w2,
            experts.w2_scale,
            topk_weights,
            parts,
            topk_ids,
            *blocks,
            *here,
            hidden_size,
            inner_size,
            *experts.w2.stride(),
            *_strides(experts.w2_scale, 3),
            **constants,
        )
        kernels.combine[hidden.shape[0], -(-hidden_size // _COMBINED)](
            parts, topk_ids, out, *here, hidden_size, TOP_K=top_k, BLOCK_N=_COMBINED
        )
    return out


def sort_slots(topk_ids: Tensor, first_expert: int, num_experts: int, *, block_m: int) -> Blocks:
    """Slots by expert, in blocks of up to `block_m`; those of other ranks' experts in none."""
    slots = topk_ids.numel()
    chunks = -(-slots // _CHUNK)
    # Each expert that gets any slots has at most one block that is not full.
    count = slots // block_m + min(slots, num_experts)
    bins = max(_FEWEST_BINS, 1 << num_experts.bit_length())
    ints = partial(torch.empty, dtype=torch.int32, device=topk_ids.device)
    counts, totals = ints(chunks, bins), ints(bins)
    blocks = Blocks(ints(slots), ints(count), ints(count), ints(count), count)
    here = first_expert, num_experts
    kernels.count_slots[chunks,](topk_ids, counts, slots, *here, CHUNK=_CHUNK, EXPERTS=bins)
    kernels.add_counts[bins // _COLUMNS,](
        counts, totals, chunks, EXPERTS=bins, ROWS=_ROWS, COLUMNS=_COLUMNS
    )
    kernels.place_slots[max(chunks, -(-count // _BLOCKS)),](
        topk_ids,
        counts,
        totals,
        *blocks[:4],
        slots,
        chunks,
        count,
        *here,
        BLOCK_M=block_m,
        CHUNK=_CHUNK,
        BLOCKS=_BLOCKS,
        EXPERTS=bins,
    )
    return blocks


def _launch(
    tile: Tile, blocks: Blocks, columns: int, depth: int, block: tuple[int, int] | None
) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and constants for a product of `columns` columns, summed over `depth`."""
    block_k = tile.block_k if block is None else block[1]
    grid = (blocks.bound * -(-columns // tile.block_n),)
    return grid, {
        "SORTED": blocks.sorted_slots is not None,
        "EVEN_N": columns % tile.block_n == 0,
        "EVEN_K": depth % block_k == 0,
        "FP8": block is not None,
        "SCALE_ROWS": 1 if block is None else block[0],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": block_k,
        "GROUP_M": tile.group_m,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "enable_fp_fusion": True,
    }


def _strides(scale: Tensor | None, axes: int) -> tuple[int, ...]:
    return (0,) * axes if scale is None else scale.stride()
