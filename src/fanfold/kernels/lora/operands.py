"""What the kernels of the fold are given: pointers of a table, and of the rows that meet it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fanfold.kernels.lora import device
from fanfold.kernels.lora.config import GATHER_TILE
from fanfold.spec.adapters import AdapterRows, AdapterTable, AdapterWork

Source = AdapterWork | AdapterRows
_FUNCTIONS: Any = device  # device functions: their types are Triton's


class Entries(NamedTuple):
    """The tensors of an AdapterTable."""

    a: Tensor
    b: Tensor
    scale: Tensor
    rank: Tensor


class Planned(NamedTuple):
    """The tensors of an AdapterWork."""

    items: Tensor
    positions: Tensor
    rows: Tensor


class Gathered(NamedTuple):
    """An AdapterRows."""

    expert_ids: Tensor
    adapter_ids: Tensor | None
    sorted_rows: Tensor | None
    one_slot: int
    top_k: int


def entries(table: AdapterTable) -> Entries:
    """The operands of a table."""
    return Entries(table.a, table.b, table.scale, table.rank)


def operands_of(source: Source) -> tuple[Planned | Gathered, Any]:
    """The operands of the rows, and the device function that reads them."""
    if isinstance(source, AdapterWork):
        return Planned(source.items, source.positions, source.rows), _FUNCTIONS.planned_rows
    ids = source.expert_ids, source.adapter_ids, source.sorted_rows
    return Gathered(*ids, source.one_slot, source.top_k), _FUNCTIONS.gathered_rows


def row_count(source: Source) -> int:
    """R."""
    return source.rows.numel() if isinstance(source, AdapterWork) else source.expert_ids.numel()


def item_count(source: Source) -> int:
    """Items of a launch: those of the plan, or rows."""
    return source.items.shape[0] if isinstance(source, AdapterWork) else source.expert_ids.numel()


def tile_of(source: Source) -> int:
    """Rows of a program."""
    return source.tile if isinstance(source, AdapterWork) else GATHER_TILE
