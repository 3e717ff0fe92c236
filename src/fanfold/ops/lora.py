"""Operations of the LoRA fold over tables of addresses: the order of rows, shrink, and expand-and-fold.

T tokens, k experts a token, R = T*k rows, P projections (gate and up, or one). Positions are sorted ones of a plan, or
places of single rows. Windows [row_offset, row_end) are of positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.kernels.lora import by_address
from fanfold.kernels.lora import reference as reference_lora
from fanfold.kernels.lora.sizes import work_items
from fanfold.ops.op import Op, in_place, refuse_gradients
from fanfold.spec.adapters import AdapterRows, AdapterTable, AdapterWork
from fanfold.spec.route import Route

TABLE = "Tensor a, Tensor b, Tensor scale, Tensor rank, int k, int n, int max_rank"
WORK = "Tensor items, Tensor positions, Tensor rows, int top_k, int slots, int tile"
ROWS = "Tensor expert_ids, Tensor? adapter_ids, Tensor? sorted_rows, int top_k, int one_slot"
WINDOW = "int row_offset, int row_end"
Table = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]
"""AdapterTable: its tensors and sizes; the dtype of its pairs is that of the activations."""
Work = tuple[Tensor, Tensor, Tensor, int, int, int]
"""AdapterWork."""
Rows = tuple[Tensor, Tensor | None, Tensor | None, int, int]
"""AdapterRows."""


def table_arguments(table: AdapterTable) -> Table:
    """The arguments that hand over a table."""
    return table.a, table.b, table.scale, table.rank, table.k, table.n, table.max_rank


def lora_plan(
    expert_offsets: Tensor,
    sorted_rows: Tensor,
    adapter_ids: Tensor | None,
    top_k: int,
    slots: int,
    tile: int,
    one_slot: int,
    unknown: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A plan's rows by (expert, adapter slot) -> items int32 [S, 4], positions int32 [R], rows int32 [R].

    See spec.AdapterWork. `unknown`, int32 [1], grows by the tokens whose id is no slot's.
    """
    route = _route(expert_offsets, sorted_rows, top_k)
    work = reference_lora.order_rows(route, adapter_ids, slots, tile, one_slot=one_slot)
    by_address.count_unknown(adapter_ids, slots, unknown)
    return work.items, work.positions, work.rows.clone()


def lora_plan_cuda(
    expert_offsets: Tensor,
    sorted_rows: Tensor,
    adapter_ids: Tensor | None,
    top_k: int,
    slots: int,
    tile: int,
    one_slot: int,
    unknown: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """lora_plan on the GPU, in one launch."""
    from fanfold.kernels.lora.plan import order_rows

    route = _route(expert_offsets, sorted_rows, top_k)
    work = order_rows(route, adapter_ids, slots, tile, one_slot=one_slot, unknown=unknown)
    return work.items, work.positions, work.rows


def lora_plan_fake(
    expert_offsets: Tensor,
    sorted_rows: Tensor,
    adapter_ids: Tensor | None,
    top_k: int,
    slots: int,
    tile: int,
    one_slot: int,
    unknown: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of lora_plan."""
    rows, experts = sorted_rows.shape[0], expert_offsets.shape[0] - 1
    items = sorted_rows.new_empty((work_items(rows, experts, slots, tile), 4))
    return items, torch.empty_like(sorted_rows), torch.empty_like(sorted_rows)


def lora_shrink_grouped(x: Tensor, *arguments: *tuple[*Table, *Work, Tensor, bool, int, int]) -> None:
    """Makes xa [P, cap, rank] = act(x A^T) of the window's rows that have a pair.

    x is [T, K] with gather_x, else [R, K]. One launch on a GPU, as for the three below.
    """
    work = AdapterWork(*arguments[7:13])
    _shrink("lora_shrink_grouped", x, arguments[:7], work, *arguments[13:], None)


def lora_expand_grouped(y: Tensor, *arguments: *tuple[*Table, *Work, Tensor, int, int, bool]) -> None:
    """Makes y [R, P*N] = act(y + scale * act(xa B^T)) of the window's rows, in place; at rows with scatter."""
    _expand("lora_expand_grouped", y, arguments[:7], AdapterWork(*arguments[7:13]), *arguments[13:])


def lora_shrink_gather(x: Tensor, *arguments: *tuple[*Table, *Rows, Tensor, bool, int, int, Tensor | None]) -> None:
    """As lora_shrink_grouped, for rows one by one without a plan of adapters. For few rows."""
    _shrink("lora_shrink_gather", x, arguments[:7], _rows(arguments[7:12]), *arguments[12:])


def lora_expand_gather(y: Tensor, *arguments: *tuple[*Table, *Rows, Tensor, int, int, bool]) -> None:
    """As lora_expand_grouped, for rows one by one without a plan of adapters. For few rows."""
    _expand("lora_expand_gather", y, arguments[:7], _rows(arguments[7:12]), *arguments[12:])


def _shrink(
    op: str,
    x: Tensor,
    table: Table,
    source: AdapterWork | AdapterRows,
    xa: Tensor,
    gather_x: bool,
    row_offset: int,
    row_end: int,
    unknown: Tensor | None,
) -> None:
    refuse_gradients("the LoRA fold", x, xa)
    held = _table(x, table)
    if x.device.type == "cpu":
        if isinstance(source, AdapterRows):  # a plan has counted
            by_address.count_unknown(source.adapter_ids, held.slots, unknown)
        by_address.shrink(x, held, source, xa, gather_x, row_offset, row_end)
        return
    from fanfold.kernels.lora.launch import shrink

    shrink(op, x, held, source, xa, gather_x=gather_x, row_offset=row_offset, row_end=row_end, unknown=unknown)


def _expand(
    op: str,
    y: Tensor,
    table: Table,
    source: AdapterWork | AdapterRows,
    xa: Tensor,
    row_offset: int,
    row_end: int,
    scatter: bool,
) -> None:
    refuse_gradients("the LoRA fold", y, xa)
    held = _table(y, table)
    if y.device.type == "cpu":
        by_address.expand(y, held, source, xa, row_offset, row_end, scatter)
        return
    from fanfold.kernels.lora.launch import expand

    expand(op, y, held, source, xa, row_offset=row_offset, row_end=row_end, scatter=scatter)


def _table(x: Tensor, table: Table) -> AdapterTable:
    a, b, scale, rank, k, n, max_rank = table
    return AdapterTable(a, b, scale, rank, k=k, n=n, max_rank=max_rank, dtype=x.dtype)


def _rows(rows: Rows) -> AdapterRows:
    expert_ids, adapter_ids, sorted_rows, top_k, one_slot = rows
    return AdapterRows(expert_ids, adapter_ids, top_k, sorted_rows, one_slot)


def _route(expert_offsets: Tensor, sorted_rows: Tensor, top_k: int) -> Route:
    return Route(expert_offsets, sorted_rows, sorted_rows, top_k)  # positions are not read here


OPS = {
    "lora_plan": Op(
        "(Tensor expert_offsets, Tensor sorted_rows, Tensor? adapter_ids, int top_k, int slots, int tile, "
        "int one_slot, Tensor(a!)? unknown) -> (Tensor, Tensor, Tensor)",
        lora_plan,
        lora_plan_cuda,
        lora_plan_fake,
        floats=False,
    ),
    "lora_shrink_grouped": Op(
        f"(Tensor x, {TABLE}, {WORK}, Tensor(a!) xa, bool gather_x, {WINDOW}) -> ()",
        lora_shrink_grouped,
        lora_shrink_grouped,
        in_place,
        floats=False,
    ),
    "lora_expand_grouped": Op(
        f"(Tensor(a!) y, {TABLE}, {WORK}, Tensor xa, {WINDOW}, bool scatter) -> ()",
        lora_expand_grouped,
        lora_expand_grouped,
        in_place,
        floats=False,
    ),
    "lora_shrink_gather": Op(
        f"(Tensor x, {TABLE}, {ROWS}, Tensor(a!) xa, bool gather_x, {WINDOW}, Tensor(b!)? unknown) -> ()",
        lora_shrink_gather,
        lora_shrink_gather,
        in_place,
        floats=False,
    ),
    "lora_expand_gather": Op(
        f"(Tensor(a!) y, {TABLE}, {ROWS}, Tensor xa, {WINDOW}, bool scatter) -> ()",
        lora_expand_gather,
        lora_expand_gather,
        in_place,
        floats=False,
    ),
}
