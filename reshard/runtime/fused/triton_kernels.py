"""The kernels of the fused experts.

A slot is one (token, expert) pair: slot s is choice s % k of token s // k. Slots are sorted by expert
without moving data; a block is up to BLOCK_M slots of one expert, and names its expert and its
range of the sorted list. Then two matrix products over the blocks, and a sum over each token's slots:

    count_slots, add_counts, place_slots     topk_ids -> sorted_slots, blocks
    gate_up                                  inner[row] = silu(x gate^T) * (x up^T)
    down                                     parts[slot] = weight * (inner[row] w2^T)
    combine                                  out[token] = sum of its parts, in the order of choices

Nothing here depends on what only the device knows: grids are upper bounds, and programs whose block
is empty return. There are no atomics, so equal inputs give equal bits.

This file imports triton alone, so that the kernels can be compiled without torch and without a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _local_experts(topk_ids, slots, inside, first_expert, num_experts):
    """The experts of slots, counted from the first one here; -1 for one that is elsewhere."""
    ids = tl.load(topk_ids + slots, mask=inside, other=-1).to(tl.int64) - first_expert
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit
def count_slots(
    topk_ids,  # [S]
    counts,  # [chunks, EXPERTS], written
    num_slots,
    first_expert,
    num_experts,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """How many slots of each expert there are in each chunk of CHUNK slots. One program a chunk."""
    chunk = tl.program_id(0)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    experts = _local_experts(topk_ids, slots, slots < num_slots, first_expert, num_experts)
    found = tl.histogram(tl.where(experts >= 0, experts, EXPERTS - 1), EXPERTS)
    # The last bin is no expert's: there are fewer experts than bins.
    bins = tl.arange(0, EXPERTS)
    tl.store(counts + chunk * EXPERTS + bins, tl.where(bins < num_experts, found, 0))


@triton.jit
def add_counts(
    counts,  # [chunks, EXPERTS], replaced by the sums over the chunks before each
    totals,  # [EXPERTS], written: the sums over all chunks
    num_chunks,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sums over chunks, for COLUMNS experts a program, ROWS chunks at a time."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_chunks, ROWS):
        rows = first + tl.arange(0, ROWS)
        where = counts + rows[:, None] * EXPERTS + columns[None, :]
        inside = (rows < num_chunks)[:, None]
        found = tl.load(where, mask=inside, other=0)
        sums = tl.cumsum(found, 0)
        tl.store(where, sums - found + before[None, :], mask=inside)
        before += tl.sum(found, 0)
    tl.store(totals + columns, before)


@triton.jit
def place_slots(
    topk_ids,  # [S]
    counts,  # [chunks, EXPERTS]: slots of each expert in the chunks before
    totals,  # [EXPERTS]
    sorted_slots,  # [S], written: slots by expert, each expert's in their order
    block_expert,  # [blocks], written
    block_begin,  # [blocks], written: its range of sorted_slots; empty for a block of no use
    block_end,
    num_slots,
    num_chunks,
    max_blocks,
    first_expert,
    num_experts,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Each program sorts one chunk of slots, and describes BLOCKS blocks."""
    program = tl.program_id(0)
    bins = tl.arange(0, EXPERTS)
    total = tl.load(totals + bins)
    ends = tl.cumsum(total, 0)

    if program < num_chunks:
        place = tl.arange(0, CHUNK)
        slots = program * CHUNK + place
        experts = _local_experts(topk_ids, slots, slots < num_slots, first_expert, num_experts)
        before = ends - total + tl.load(counts + program * EXPERTS + bins)
        earlier = (experts[:, None] == experts[None, :]) & (place[None, :] < place[:, None])
        rows = tl.gather(before, tl.maximum(experts, 0), 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(sorted_slots + rows, slots, mask=experts >= 0)

    blocks = tl.cdiv(total, BLOCK_M)
    block_ends = tl.cumsum(blocks, 0)
    block = program * BLOCKS + tl.arange(0, BLOCKS)
    expert = tl.sum((block_ends[None, :] <= block[:, None]).to(tl.int32), 1)
    used = expert < num_experts
    expert = tl.minimum(expert, EXPERTS - 1)
    # What the first block of each expert would begin with, were it block 0.
    origin = ends - total - (block_ends - blocks) * BLOCK_M
    begin = tl.gather(origin, expert, 0) + block * BLOCK_M
    end = tl.minimum(begin + BLOCK_M, tl.gather(ends, expert, 0))
    inside = block < max_blocks
    tl.store(block_expert + block, expert, mask=inside)
    tl.store(block_begin + block, tl.where(used, begin, 0), mask=inside)
    tl.store(block_end + block, tl.where(used, end, 0), mask=inside)


@triton.jit
def _tile(columns, max_blocks, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The block and the columns of this program: GROUP_M blocks in turn share a tile of weights."""
    program = tl.program_id(0)
    across = tl.cdiv(columns, BLOCK_N)
    group = program // (GROUP_M * across)
    first = group * GROUP_M
    height = tl.minimum(max_blocks - first, GROUP_M)
    within = program % (GROUP_M * across)
    return first + within % height, within // height


@triton.jit
def _block(
    block,
    topk_ids,
    block_expert,
    block_begin,
    block_end,
    first_expert,
    num_experts,
    SORTED: tl.constexpr,
):
    """Expert and range of rows of a block; without sorting, each slot is a block of its own."""
    if SORTED:
        expert = tl.load(block_expert + block).to(tl.int64)
        begin = tl.load(block_begin + block)
        end = tl.load(block_end + block)
    else:
        expert = tl.load(topk_ids + block).to(tl.int64) - first_expert
        here = (expert >= 0) & (expert < num_experts)
        begin = block
        end = tl.where(here, block + 1, block)
    return expert, begin, end


@triton.jit
def _rows(begin, end, sorted_slots, BLOCK_M: tl.constexpr, SORTED: tl.constexpr):
    """The rows of a block, their slots, and which of them there are; others repeat the first."""
    rows = begin + tl.arange(0, BLOCK_M)
    here = rows < end
    rows = tl.where(here, rows, begin)
    if SORTED:
        slots = tl.load(sorted_slots + rows)
    else:
        slots = rows
    return rows.to(tl.int64), slots.to(tl.int64), here


@triton.jit
def _to_fp8(a):
    """Rows of one group each as FP8 (e4m3), and what they have to be multiplied with."""
    a = a.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(a), 1), 1e-30) / 448.0
    return (a / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit
def gate_up(
    x,  # [T, H]
    w13,  # [E, 2I, H], by strides
    scale,  # [E, 2, scale rows, scale columns], by strides; FP8 only
    inner,  # [S, I], written: by row of the sorted list, or by slot
    topk_ids,
    sorted_slots,
    block_expert,
    block_begin,
    block_end,
    max_blocks,
    first_expert,
    num_experts,
    top_k,
    hidden_size,  # H
    inner_size,  # I
    stride_e,
    stride_n,
    stride_k,
    scale_stride_e,
    scale_stride_half,
    scale_stride_n,
    scale_stride_k,
    SORTED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """silu(gate) * up for a block of slots and BLOCK_N of the I columns.

    Both products share the tile of x. Sums and the activation are in float32, rounded once. With
    FP8, BLOCK_K is the number of columns that share a scale.
    """
    block, tile_n = _tile(inner_size, max_blocks, BLOCK_N, GROUP_M)
    expert, begin, end = _block(
        block, topk_ids, block_expert, block_begin, block_end, first_expert, num_experts, SORTED
    )
    if begin >= end:
        return
    rows, slots, here = _rows(begin, end, sorted_slots, BLOCK_M, SORTED)

    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n = columns if EVEN_N else columns % inner_size
    k = tl.arange(0, BLOCK_K)
    a_at = x + (slots // top_k)[:, None] * hidden_size + k[None, :]
    # Within an expert, offsets fit 32 bits; over all experts they do not.
    gate_at = w13 + expert * stride_e + n[None, :] * stride_n + k[:, None] * stride_k
    up_at = gate_at + inner_size * stride_n
    if FP8:
        gate_scale_at = scale + expert * scale_stride_e + n // SCALE_ROWS * scale_stride_n
        up_scale_at = gate_scale_at + scale_stride_half

    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(hidden_size, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_at)
            w_gate = tl.load(gate_at)
            w_up = tl.load(up_at)
        else:
            inside = k < hidden_size - step * BLOCK_K
            a = tl.load(a_at, mask=inside[None, :], other=0.0)
            w_gate = tl.load(gate_at, mask=inside[:, None], other=0.0)
            w_up = tl.load(up_at, mask=inside[:, None], other=0.0)
        if FP8:
            a, a_scale = _to_fp8(a)
            gate_scale = tl.load(gate_scale_at).to(tl.float32)
            up_scale = tl.load(up_scale_at).to(tl.float32)
            gate += tl.dot(a, w_gate) * a_scale[:, None] * gate_scale[None, :]
            up += tl.dot(a, w_up) * a_scale[:, None] * up_scale[None, :]
            gate_scale_at += scale_stride_k
            up_scale_at += scale_stride_k
        else:
            # Products of float32 are exact, not TF32.
            gate = tl.dot(a, w_gate, gate, input_precision="ieee")
            up = tl.dot(a, w_up, up, input_precision="ieee")
        a_at += BLOCK_K
        gate_at += BLOCK_K * stride_k
        up_at += BLOCK_K * stride_k

    y = gate / (1.0 + tl.exp(-gate)) * up
    out_at = inner + rows[:, None] * inner_size + columns[None, :]
    tl.store(
        out_at, y.to(inner.dtype.element_ty), mask=here[:, None] & (columns < inner_size)[None, :]
    )


@triton.jit
def down(
    inner,  # [S, I]
    w2,  # [E, H, I], by strides
    scale,  # [E, scale rows, scale columns], by strides; FP8 only
    topk_weights,  # [S], float32
    parts,  # [S, H], written: by slot; not those of experts that are elsewhere
    topk_ids,
    sorted_slots,
    block_expert,
    block_begin,
    block_end,
    max_blocks,
    first_expert,
    num_experts,
    hidden_size,  # H
    inner_size,  # I
    stride_e,
    stride_n,
    stride_k,
    scale_stride_e,
    scale_stride_n,
    scale_stride_k,
    SORTED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    FP8: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """weight * (inner w2^T) for a block of slots and BLOCK_N of the H columns, rounded once."""
    block, tile_n = _tile(hidden_size, max_blocks, BLOCK_N, GROUP_M)
    expert, begin, end = _block(
        block, topk_ids, block_expert, block_begin, block_end, first_expert, num_experts, SORTED
    )
    if begin >= end:
        return
    rows, slots, here = _rows(begin, end, sorted_slots, BLOCK_M, SORTED)

    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n = columns if EVEN_N else columns % hidden_size
    k = tl.arange(0, BLOCK_K)
    a_at = inner + rows[:, None] * inner_size + k[None, :]
    w_at = w2 + expert * stride_e + n[None, :] * stride_n + k[:, None] * stride_k
    if FP8:
        scale_at = scale + expert * scale_stride_e + n // SCALE_ROWS * scale_stride_n

    y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(tl.cdiv(inner_size, BLOCK_K)):
        if EVEN_K:
            a = tl.load(a_at)
            w = tl.load(w_at)
        else:
            inside = k < inner_size - step * BLOCK_K
            a = tl.load(a_at, mask=inside[None, :], other=0.0)
            w = tl.load(w_at, mask=inside[:, None], other=0.0)
        if FP8:
            a, a_scale = _to_fp8(a)
            w_scale = tl.load(scale_at).to(tl.float32)
            y += tl.dot(a, w) * a_scale[:, None] * w_scale[None, :]
            scale_at += scale_stride_k
        else:
            y = tl.dot(a, w, y, input_precision="ieee")
        a_at += BLOCK_K
        w_at += BLOCK_K * stride_k

    y *= tl.load(topk_weights + slots)[:, None]
    out_at = parts + slots[:, None] * hidden_size + columns[None, :]
    tl.store(
        out_at, y.to(parts.dtype.element_ty), mask=here[:, None] & (columns < hidden_size)[None, :]
    )


@triton.jit
def combine(
    parts,  # [S, H]
    topk_ids,
    out,  # [T, H], written
    first_expert,
    num_experts,
    hidden_size,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sum of one token's parts, in float32 and in their order; BLOCK_N columns a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = token * TOP_K + choice
        expert = tl.load(topk_ids + slot).to(tl.int64) - first_expert
        here = (expert >= 0) & (expert < num_experts)
        written = tl.where(here, hidden_size, 0)
        part = tl.load(parts + slot * hidden_size + columns, mask=columns < written, other=0.0)
        total += part.to(tl.float32)
    at = out + token * hidden_size + columns
    tl.store(at, total.to(out.dtype.element_ty), mask=columns < hidden_size)
