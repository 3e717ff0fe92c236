"""Both products of a layer, with the adapters of the batch between or behind them where there are any."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fanfold.kernels.lora.launch import fold_down, fold_gate_up, shrink
from fanfold.kernels.lora.operands import Source, row_count
from fanfold.kernels.lora.plan import empty_work, order_rows
from fanfold.kernels.lora.sizes import FEW_ROWS, row_tile
from fanfold.layers.implementations import Adapters
from fanfold.routing.plan import plan_sort
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import AdapterRows, AdapterTable, Aside, Expand, xa_columns
from fanfold.spec.route import Route
from fanfold.spec.work import WorkItems


def products(
    hidden: Tensor,
    topk_ids: Tensor,
    route: Route | None,
    activation: Activation,
    adapters: Adapters | None,
    gate_up: Callable[[Aside | None], Tensor],
    down: Callable[[Tensor], Tensor],
    chained: bool,
) -> Tensor:
    """From hidden states to y2, by row.

    Args:
        hidden: [T, H].
        topk_ids: [T, k], contiguous.
        route: the plan; None where positions are rows.
        activation: between the products.
        adapters: of the call; None for none.
        gate_up: the first product with its activation, at sorted positions: h, but for rows set aside.
        down: the second: h -> y2 by row.
        chained: whether the device can start a kernel while the one before still runs. Then rows are ordered beside the
            end of gate_up. The fold itself starts behind it: its programs would crowd where gate_up ends first.
    """
    if adapters is None:
        return down(gate_up(None))
    table, rows, top_k = adapters.gate_up, topk_ids.numel(), topk_ids.shape[1]
    y1 = hidden.new_empty((rows, table.projections * table.n))
    aside = Aside(y1, adapters.ids, table.slots, top_k)
    behind_order = False
    if route is None or rows <= FEW_ROWS:
        ordered = None if route is None else route.sorted_rows
        source: Source = AdapterRows(topk_ids.flatten(), adapters.ids, top_k, ordered)
        h = gate_up(aside)
    else:
        tile = row_tile(rows, route.num_experts, table.slots)
        # Before gate_up, which may give memory back that it still reads while the rows are ordered.
        work = empty_work(route, table.slots, tile) if chained else None
        h = gate_up(aside)
        source = order_rows(route, adapters.ids, table.slots, tile, unknown=adapters.unknown, work=work)
        behind_order = chained  # which ends after gate_up
    fold_gate_up(y1, hidden, table, source, activation, h, unknown=adapters.unknown, chained=behind_order)
    return fold_down(down(h), h, adapters.down, source, scatter=route is not None)


def source_of(topk_ids: Tensor, route: Route | None, work: WorkItems, adapters: Adapters) -> Source:
    """The batch's rows as the fold meets them: one after the other where they are few, else by adapter.

    In the second case the work items get that order too, so that a tile of the products meets few adapters.
    """
    rows, slots = topk_ids.numel(), adapters.gate_up.slots
    if route is None or rows <= FEW_ROWS:
        ordered = None if route is None else route.sorted_rows
        return AdapterRows(topk_ids.flatten(), adapters.ids, topk_ids.shape[1], ordered)
    tile = row_tile(rows, route.num_experts, slots)
    return order_rows(route, adapters.ids, slots, tile, unknown=adapters.unknown, items=work)


def shrunk(
    op: str, x: Tensor, table: AdapterTable, source: Source, adapters: Adapters, gather_x: bool, chained: bool
) -> Expand:
    """What a product needs to fold the adapters behind its sums; with `chained` it begins while rows still shrink.

    Args:
        op: the operation's name, for errors.
        x: hidden states with `gather_x`, else h.
        table: of the projection.
        source: of `source_of`.
        adapters: of the call.
        gather_x: x's row is the token of the position. Then tokens with unknown ids are counted, where no plan did.
        chained: whether the product is launched so.
    """
    rows = row_count(source)
    xa = x.new_empty((table.projections, rows, xa_columns(table.max_rank)))
    unknown = adapters.unknown if gather_x and isinstance(source, AdapterRows) else None
    shrink(op, x, table, source, xa, gather_x=gather_x, unknown=unknown, chained=chained, lets_in=chained)
    return Expand(xa, table, adapters.ids, source.top_k)


def fold_rows(y: Tensor, x: Tensor, table: AdapterTable, adapter_ids: Tensor) -> Tensor:
    """The adapters of a plain module, in place: y [R, N], x [R, K], ids int32 [R]."""
    alike = torch.zeros_like(adapter_ids)
    if len(y) <= FEW_ROWS:
        return fold_down(y, x.contiguous(), table, AdapterRows(alike, adapter_ids.contiguous(), 1))
    with torch.cuda.device_of(y):
        route, _ = plan_sort(alike[:, None], 1, 64)
        source = order_rows(route, adapter_ids.contiguous(), table.slots, row_tile(len(y), 1, table.slots))
    return fold_down(y, x.contiguous(), table, source)
