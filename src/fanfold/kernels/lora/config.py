"""How a launch of the fold is cut into programs. No choice here changes a bit of the result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.kernels.lora.sizes import RANK_TILE, padded_rank

SPLIT = 4
"""Parts that K is summed in, each by a warp of its own: all that a sum depends on, and the same for every config."""
GATHER_TILE = 8
"""Rows of a program that has one: the fewest columns of the matrix units."""
LARGE = (0, 90, 100)
"""Compute capabilities with 227 KiB of shared memory."""
ENOUGH_PROGRAMS = 512
"""Below that, programs share items. Measured: 512 is better than 128 with 128 rows; 1024 is worse with 512 rows."""


@dataclass(frozen=True)
class FoldConfig:
    """Tile and resources of one program.

    Attributes:
        block_r: columns of the rank.
        block_k: inputs contracted a step, over all parts; at most 64 * SPLIT.
        block_n: outputs.
        num_warps: warps of 32 threads.
        num_stages: steps whose loads are in flight.
    """

    block_r: int
    block_k: int
    block_n: int
    num_warps: int
    num_stages: int


def config_for(max_rank: int, tile: int, dtype: torch.dtype, arch: int) -> FoldConfig:
    """The config for tiles of `tile` rows.

    Args:
        max_rank: of the table.
        tile: one of sizes.ROW_TILES.
        dtype: of the activations.
        arch: compute capability, e.g. 90; 0 in the interpreter.

    Returns:
        Chosen by registers (none spills: so sm_120 has configs of its own), shared memory, and bytes in flight.
    """
    block_r = 16
    while block_r < min(max_rank, RANK_TILE):
        block_r *= 2
    if dtype == torch.float32:
        return FoldConfig(block_r, 64, 64, 8, 3 if arch == 120 else 2)  # without matrix units
    if arch not in LARGE:
        block_k = 256 if (arch, block_r) == (120, 16) else 128
        return FoldConfig(block_r, block_k, 128, 4, 2)
    return FoldConfig(block_r, 256, 256 if tile == 8 and block_r == 16 else 128, 4, 3)


def takes_one_launch(max_rank: int) -> bool:
    """Whether shrink and expand are one launch: a program holds all columns of the rank."""
    return padded_rank(max_rank) <= RANK_TILE


def parts_for(items: int, tiles: int) -> int:
    """Programs that share an item, each with its own outputs; they all shrink, from the L2 cache but for the first."""
    return max(1, min(tiles, ENOUGH_PROGRAMS // max(items, 1)))
