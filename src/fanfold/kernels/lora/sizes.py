"""Sizes of the fold: padded ranks, tiles, grids, windows. Plain integers; no GPU is asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fanfold.errors import ArgumentError
from fanfold.spec.lora import MOST_RANK as MOST_RANK
from fanfold.spec.lora import RANK_ALIGN as RANK_ALIGN
from fanfold.spec.lora import padded_rank as padded_rank

ROW_TILES = (8, 16)
"""Rows of a tile: what the kernels are made for. A row's bits are the same in each."""
FEW_ROWS = 512
"""Rows of a batch up to which single rows (AdapterRows) are faster than a plan; measured with 4 adapters of rank 16."""
RANK_TILE = 32
"""Most columns of the rank that a program holds; up to here shrink and expand are one launch."""


def row_to_token(row: int, top_k: int) -> int:
    """The token of a row = token * top_k + slot."""
    return row // top_k


def row_tile(rows: int, experts: int, slots: int) -> int:
    """The tile of a batch: twice the mean rows of a (expert, slot) pair fit in it, or it is the largest.

    Args:
        rows: R.
        experts: E.
        slots: adapter slots.

    Returns:
        One of ROW_TILES.
    """
    mean = rows / max(1, min(rows, experts * slots))
    return next((tile for tile in ROW_TILES if 2 * mean <= tile), ROW_TILES[-1])


def first_item(offset: int, expert: int, slots: int, tile: int) -> int:
    """The first work item of an expert whose rows start at sorted position `offset`.

    Up to the first item of the next expert there is room for all of its tiles, whatever its rows' slots: n rows of at
    most slots + 1 kinds (the base is one) make at most n // tile + min(n, slots + 1) tiles.
    """
    return offset // tile + min(offset, expert * (slots + 1))


def work_items(rows: int, experts: int, slots: int, tile: int) -> int:
    """Work items of a batch, over all routings and adapter ids: the worst-case grid.

    Args:
        rows: R.
        experts: E.
        slots: adapter slots.
        tile: rows of a tile.

    Returns:
        R // tile + min(R, E * (slots + 1)).
    """
    return first_item(rows, experts, slots, tile)


def tile_count(rows_of_pairs: Iterable[int], tile: int) -> int:
    """The exact number of tiles, where the host knows the rows of each (expert, slot)."""
    return sum(-(-rows // tile) for rows in rows_of_pairs)


def worst_case_grid(rows: int, experts: int, slots: int, tile: int, columns: int, block: int) -> tuple[int, int]:
    """Programs of a grouped launch: a work item by a block of columns (of the rank, or of the outputs)."""
    return work_items(rows, experts, slots, tile), -(-columns // block)


def exact_grid(rows_of_pairs: Iterable[int], tile: int, columns: int, block: int) -> tuple[int, int]:
    """Programs of a grouped launch that have work, where the host knows the rows of each (expert, slot)."""
    return tile_count(rows_of_pairs, tile), -(-columns // block)


def gather_grid(rows: int, columns: int, block: int) -> tuple[int, int]:
    """Programs of a gathered launch: exactly one for each row and block of columns."""
    return rows, -(-columns // block)


def windows(rows: int, cap: int) -> Iterator[tuple[int, int]]:
    """Windows [row_offset, row_end) of at most `cap` sorted positions that cover [0, rows) once, in order.

    Raises:
        ArgumentError: cap < 1.
    """
    if cap < 1:
        raise ArgumentError(
            "windows: cap",
            found=str(cap),
            expected="at least 1 row",
            next_step="Pass the rows that the xa scratch holds.",
        )
    return ((start, min(start + cap, rows)) for start in range(0, rows, cap))
