"""Tile sizes of the kernels, by class of GPU, kind of weights, and rows that an expert gets.

A tile is chosen for its shared memory and registers: none of these spills, on any GPU it is used on,
with triton 3.6 and 3.9. None was timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["16-bit", "fp8", "float32"]


@dataclass(frozen=True, slots=True)
class Tile:
    """A program computes `block_m` x `block_n` of a product, `block_k` at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def group_m(self) -> int:
        """Blocks that share a tile of weights in turn; small batches have one block an expert."""
        return 1 if self.block_m <= 32 else 8


@dataclass(frozen=True, slots=True)
class Tiles:
    """The tiles of both products, of equal `block_m`: they share the list of blocks."""

    gate_up: Tile
    down: Tile


_ROWS = ((4, 16), (24, 32), (96, 64))
"""Up to so many rows an expert: this block_m. More: 128."""

_FLOAT32 = Tile(32, 32, 32, 4, 2)

_SMALL: dict[tuple[Kind, int], Tiles] = {
    ("16-bit", 16): Tiles(Tile(16, 64, 64, 4, 3), Tile(16, 64, 128, 4, 3)),
    ("16-bit", 32): Tiles(Tile(32, 64, 64, 4, 3), Tile(32, 64, 128, 4, 3)),
    ("16-bit", 64): Tiles(Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 8, 3)),
    ("16-bit", 128): Tiles(Tile(128, 64, 64, 8, 3), Tile(128, 128, 64, 8, 3)),
    ("fp8", 16): Tiles(Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 3)),
    ("fp8", 32): Tiles(Tile(32, 64, 128, 4, 3), Tile(32, 64, 128, 8, 3)),
    ("fp8", 64): Tiles(Tile(64, 64, 128, 8, 2), Tile(64, 128, 128, 8, 2)),
    ("fp8", 128): Tiles(Tile(128, 32, 128, 8, 2), Tile(128, 64, 128, 8, 2)),
    ("float32", 16): Tiles(Tile(16, 32, 32, 4, 2), Tile(16, 32, 32, 4, 2)),
    **{("float32", block_m): Tiles(_FLOAT32, _FLOAT32) for block_m in (32, 64, 128)},
}
"""For every GPU from compute capability 8.0 on: within 99 KiB of shared memory."""

_LARGE: dict[tuple[Kind, int], Tiles] = {
    **_SMALL,
    ("16-bit", 16): Tiles(Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 4)),
    ("16-bit", 128): Tiles(Tile(128, 128, 64, 8, 3), Tile(128, 256, 64, 8, 3)),
    ("fp8", 128): Tiles(Tile(128, 64, 128, 8, 2), Tile(128, 128, 128, 8, 3)),
}
"""For data-center GPUs from compute capability 9.0 on: within 227 KiB."""

CLASSES: dict[str, dict[tuple[Kind, int], Tiles]] = {"small": _SMALL, "large": _LARGE}


def gpu_class(capability: tuple[int, int]) -> str:
    """9.0 (H100, H200) and 10.x (B200) have more shared memory than 8.x and 12.x."""
    return "large" if capability[0] in (9, 10) else "small"


def choose_tiles(rows_per_expert: float, capability: tuple[int, int], kind: Kind) -> Tiles:
    """The tiles for a batch whose experts get so many rows on average."""
    block_m = next((m for rows, m in _ROWS if rows_per_expert <= rows), 128)
    return CLASSES[gpu_class(capability)][kind, block_m]
