"""Sizes of the plan's buffers: upper bounds from the shapes alone, so that launch grids never depend on the routing."""

from __future__ import annotations


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << (max(n, 1) - 1).bit_length()


def work_slots(rows: int, experts: int, tile: int) -> int:
    """Slots of a work list.

    Expert e owns the slots from expert_offsets[e] // tile + e on, up to those of e + 1. That is room for all of its
    tiles, and depends on no other expert than through the offset.

    Args:
        rows: R.
        experts: E.
        tile: rows of a tile.

    Returns:
        R // tile + E.
    """
    return rows // tile + experts


def block_count(rows: int, experts: int, block_rows: int) -> int:
    """Blocks of a block-aligned plan, over all routings.

    At most min(R, E) experts have rows, and each pads with block_rows - 1 entries at most.

    Args:
        rows: R.
        experts: E.
        block_rows: rows of a block.

    Returns:
        The largest number of blocks; a plan has block_count * block_rows entries.
    """
    return (rows + min(rows, experts) * (block_rows - 1)) // block_rows if experts else 0
