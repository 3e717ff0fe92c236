"""WorkList, WorkItems and Blocks: a Route cut into tiles of rows, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class WorkList:
    """Tiles of sorted positions, for kernels whose programs each take one.

    Attributes:
        slots: int32 [S, 4], S = routing.sizes.work_slots(R, E, tile): expert or -1, first sorted position, rows (at
            most `tile`), 0. Slots of an expert of -1 hold no work and lie anywhere in the list.
        tile: most rows of a slot; a kernel with another tile can't use the list.
    """

    slots: Tensor
    tile: int


@dataclass(frozen=True, eq=False)
class WorkItems:
    """A work list in one word an item, its rows beside it, so that one load leads a program to its first row.

    Attributes:
        items: int64 [S]: expert << 48 | rows << 32 | first sorted position; -1 holds no work. Where `single`, int32
            or int64 [R]: the expert of each row; ids outside [0, E) hold no work.
        rows: int32 [S, tile], rows of each item, unset behind their count; where `single`, `items` again.
        total: R.
        tile: most rows of an item; 1 where `single`.
        single: an item is one row, and rows keep their order: sorted position = row.
        num_experts: E.
    """

    items: Tensor
    rows: Tensor
    total: int
    tile: int
    single: bool
    num_experts: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """The block-aligned plan: every expert's rows padded to a multiple of `block_rows`.

    Example, E = 3, k = 2, topk_ids = [[2, 0], [0, -1]], block_rows = 2 (R = 4): three blocks at most,
    entries = [1, 2, 0, 4, 4, 4], experts = [0, 2, -1], padded_total = [4]; packed entries are [0, 1, 2, 4, 4, 4].

    Attributes:
        entries: int32 [B * block_rows], B = routing.sizes.block_count(R, E, block_rows): a row (token*k + slot), or,
            where `packed`, its sorted position, for x that already lies in expert order. An entry >= R is padding.
        experts: int32 [B], expert of each block, -1 past the last.
        padded_total: int32 [1], entries up to the last block with an expert.
        block_rows: entries of a block; a kernel with another tile can't use the blocks.
        packed: whether entries are sorted positions.
    """

    entries: Tensor
    experts: Tensor
    padded_total: Tensor
    block_rows: int
    packed: bool
