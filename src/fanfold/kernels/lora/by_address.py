"""Shrink and expand over tables of addresses on the CPU, in readable torch: what the kernels do, step by step."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from fanfold.kernels.common.invariant import invariant_matmul
from fanfold.kernels.lora.sizes import padded_rank
from fanfold.spec.adapters import AdapterRows, AdapterTable, AdapterWork

Source = AdapterWork | AdapterRows
Group = tuple[int, int, list[tuple[int, int]]]  # expert, slot, (place, position and row of y)


def shrink(
    x: Tensor, table: AdapterTable, source: Source, xa: Tensor, gather_x: bool, row_offset: int, row_end: int
) -> None:
    """xa = act(x A^T) of the window's rows that have a pair; the arguments are those of `launch.shrink`."""
    for expert, slot, places in _groups(source, table, row_offset, row_end):
        rows = [row // source.top_k if gather_x else position for position, row in places]
        for p in range(table.projections):
            pair = _pair(table, p, slot, expert)
            if pair is not None:
                a, _, _ = pair
                at = torch.tensor([position - row_offset for position, _ in places])
                xa[p, at, : a.shape[0]] = invariant_matmul(x[torch.tensor(rows)].float(), a.float()).to(xa.dtype)


def expand(
    y: Tensor, table: AdapterTable, source: Source, xa: Tensor, row_offset: int, row_end: int, scatter: bool
) -> None:
    """y = act(y + scale * act(xa B^T)) of the window's rows, in place; the arguments are those of `launch.expand`."""
    for expert, slot, places in _groups(source, table, row_offset, row_end):
        at = torch.tensor([row if scatter else position for position, row in places])
        local = torch.tensor([position - row_offset for position, _ in places])
        for p in range(table.projections):
            pair = _pair(table, p, slot, expert)
            if pair is not None:
                _, b, scale = pair
                delta = invariant_matmul(xa[p, local, : b.shape[1]].float(), b.float()).to(y.dtype)
                columns = slice(p * table.n, (p + 1) * table.n)
                y[at, columns] = (y[at, columns].float() + scale * delta.float()).to(y.dtype)


def count_unknown(adapter_ids: Tensor | None, slots: int, unknown: Tensor | None) -> None:
    """Adds the tokens whose id is no slot's and not below 0."""
    if adapter_ids is not None and unknown is not None:
        unknown += (adapter_ids >= slots).sum().int()


def _groups(source: Source, table: AdapterTable, row_offset: int, row_end: int) -> Iterator[Group]:
    """The window's rows by (expert, slot), those of the base left out; each as (position, row)."""
    found: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    if isinstance(source, AdapterWork):
        positions, rows = cast("list[int]", source.positions.tolist()), cast("list[int]", source.rows.tolist())
        for expert, slot, first, count in cast("list[list[int]]", source.items.tolist()):
            if expert >= 0 and slot >= 0:
                found[expert, slot] += [(positions[i], rows[i]) for i in range(first, first + count)]
    else:
        experts = cast("list[int]", source.expert_ids.tolist())
        order = source.sorted_rows
        for position, row in enumerate(range(len(experts)) if order is None else cast("list[int]", order.tolist())):
            ids = source.adapter_ids
            slot = source.one_slot if ids is None else int(ids[row // source.top_k])
            if 0 <= slot < table.slots and experts[row] >= 0:
                found[experts[row], slot].append((position, row))
    for (expert, slot), places in found.items():
        inside = [(position, row) for position, row in places if row_offset <= position < row_end]
        if inside and expert < table.a.shape[2]:
            yield expert, slot, inside


def _pair(table: AdapterTable, p: int, slot: int, expert: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """A [padded rank, K], B [N, padded rank] and the scale; None where there is none."""
    a, b = int(table.a[p, slot, expert]), int(table.b[p, slot, expert])
    if a == 0:
        return None
    rank = padded_rank(int(table.rank[p, slot, expert]))
    return (
        _at(a, (rank, table.k), table.dtype),
        _at(b, (table.n, rank), table.dtype),
        table.scale[p, slot, expert],
    )


def _at(address: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    size = shape[0] * shape[1] * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)
