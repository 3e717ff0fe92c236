"""Which adapter pairs exist, which rows of a batch meet them, and what a product does with those rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fanfold.errors import ArgumentError

RANK_STEP = 16
"""Columns of the rank that an expanding product takes at once."""


@dataclass(frozen=True, eq=False)
class AdapterTable:
    """The pairs of gate_up (P = 2: gate, up) or down (P = 1) of one layer, one entry for each (slot, expert).

    The four tensors stay where they are for the life of a layer; entries change in place, and a captured graph sees
    them at its next replay. An address of A of 0 is no pair. The table may be shorter than E: experts beyond it have
    no pair. Who writes an address keeps its memory alive.

    Attributes:
        a: int64 [P, slots, E_table], address of A, stored [padded rank, K].
        b: int64, the same shape, address of B, stored [N, padded rank]. Both are contiguous, of `dtype`, aligned to
            16 bytes; a rank is padded to a multiple of 8 with zeros.
        scale: fp32, the same shape.
        rank: int32, the same shape; at most `max_rank`.
        k: inputs of a pair.
        n: outputs of a pair.
        max_rank: the largest rank an entry may have.
        dtype: of every A and B.
    """

    a: Tensor
    b: Tensor
    scale: Tensor
    rank: Tensor
    k: int
    n: int
    max_rank: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        shape = list(self.a.shape)
        kinds = {"a": torch.int64, "b": torch.int64, "scale": torch.float32, "rank": torch.int32}
        for name, kind in kinds.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != kind or list(tensor.shape) != shape or len(shape) != 3 or not tensor.is_contiguous():
                raise ArgumentError(
                    f"AdapterTable.{name}",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                    expected=f"contiguous {kind} [projections, slots, experts], one shape for all four",
                    next_step="Make tables with fanfold.kernels.lora.table.new_table.",
                )
        if self.a.shape[0] not in (1, 2) or min(self.k, self.n, self.max_rank) < 1:
            raise ArgumentError(
                "AdapterTable",
                found=f"{self.a.shape[0]} projections, k {self.k}, n {self.n}, max_rank {self.max_rank}",
                expected="1 or 2 projections, and sizes of at least 1",
                next_step="Pass 2 projections for gate and up, 1 for down or for up without a gate.",
            )

    @property
    def projections(self) -> int:
        """P."""
        return self.a.shape[0]

    @property
    def slots(self) -> int:
        """Adapter slots."""
        return self.a.shape[1]


@dataclass(frozen=True, eq=False)
class AdapterWork:
    """The rows of a plan, ordered inside each expert by adapter slot, and cut into tiles of one (expert, slot).

    Made once a batch (`kernels.lora.plan`) for gate_up and down of a layer. Sizes are upper bounds of the shapes.

    Attributes:
        items: int32 [S, 4], S = kernels.lora.sizes.work_items(...): expert or -1 (nothing to do), adapter slot or -1
            (rows of the base), first place, rows (at most `tile`).
        positions: int32 [R], place -> sorted position. Places of an expert are those of its sorted positions; rows of
            one slot keep their order, and rows of the base come last. Unset behind expert_offsets[E].
        rows: int32 [R], place -> row (token*k + slot).
        top_k: k.
        slots: adapter slots that the rows were ordered by.
        tile: most rows of an item.
    """

    items: Tensor
    positions: Tensor
    rows: Tensor
    top_k: int
    slots: int
    tile: int


@dataclass(frozen=True, eq=False)
class AdapterRows:
    """The rows of a small batch as they are, one after the other, without a plan.

    Attributes:
        expert_ids: int32 or int64 [R], expert of each row (token*k + slot).
        adapter_ids: int32 [T], adapter slot of each token, < 0 = base; None: `one_slot` for every row.
        top_k: k.
        sorted_rows: int32 [R], place -> row, where y (and h) lie in sorted order; None where row = place.
        one_slot: adapter slot of every row where there are no ids.
    """

    expert_ids: Tensor
    adapter_ids: Tensor | None
    top_k: int
    sorted_rows: Tensor | None = None
    one_slot: int = -1


class Aside(NamedTuple):
    """Where gate_up puts y1 of the rows that have an adapter, for the fold; all other rows go on into h.

    Attributes:
        y1: [R, P*I] at positions, in h's dtype; other rows are not written.
        adapter_ids: int32 [T]; a row has an adapter where its token's id is in [0, slots).
        slots: adapter slots.
        top_k: k.
    """

    y1: Tensor
    adapter_ids: Tensor
    slots: int
    top_k: int


class Expand(NamedTuple):
    """What a product folds onto its rows before it stores them: the shrunk rows, and the pairs that expand them.

    Attributes:
        xa: [P, R, xa_columns(max_rank)] at sorted positions, in the activations' dtype: act(x A^T) of gate and up, or
            of one projection.
        table: of the projection.
        adapter_ids: int32 [T], adapter slot of each token; < 0 and >= the table's slots are the base.
        top_k: k.
    """

    xa: Tensor
    table: AdapterTable
    adapter_ids: Tensor
    top_k: int


def xa_columns(max_rank: int) -> int:
    """Columns of `Expand.xa` for ranks up to `max_rank`."""
    return -(-max_rank // RANK_STEP) * RANK_STEP
