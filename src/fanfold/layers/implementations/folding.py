"""Both products of a layer, with the adapters of the batch between or behind them where there are any."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fanfold.kernels.lora.launch import fold_down, fold_gate_up, shrink
from fanfold.kernels.lora.operands import Source
from fanfold.kernels.lora.plan import empty_work, order_rows
from fanfold.kernels.lora.sizes import FEW_ROWS, row_tile
from fanfold.layers.implementations import Adapters
from fanfold.routing.plan import plan_sort
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import AdapterRows, AdapterTable, Aside, Expand, xa_columns
from fanfold.spec.route import Route


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


def single_row_products(
    hidden: Tensor,
    topk_ids: Tensor,
    adapters: Adapters,
    gate_up: Callable[[Expand], Tensor],
    down: Callable[[Tensor], Callable[[Expand | None], Tensor]],
    *,
    one_part: bool,
    chained: bool,
) -> Tensor:
    """The same for a single token, with products that fold while their sums lie in registers.

    Args:
        hidden: [1, H].
        topk_ids: [1, k], contiguous.
        adapters: of the call.
        gate_up: the first product with fold and activation; its operands are made already.
        down: makes the operands of the second, and returns that product with the fold. It has none where its sums are
            in parts, as a change goes onto all of a sum.
        one_part: whether they are not.
        chained: whether the products are launched so: they begin while rows still shrink.
    """
    source = AdapterRows(topk_ids.flatten(), adapters.ids, topk_ids.shape[1])

    def shrunk(op: str, x: Tensor, table: AdapterTable, unknown: Tensor | None) -> Expand:
        xa = x.new_empty((table.projections, topk_ids.numel(), xa_columns(table.max_rank)))
        gather_x = x is hidden
        shrink(op, x, table, source, xa, gather_x=gather_x, unknown=unknown, chained=chained, lets_in=chained)
        return Expand(xa, table, adapters.ids, source.top_k)

    h = gate_up(shrunk("fold_gate_up", hidden, adapters.gate_up, adapters.unknown))
    product = down(h)  # before rows shrink, which the product may begin beside
    if not one_part:
        return fold_down(product(None), h, adapters.down, source)
    return product(shrunk("fold_down", h, adapters.down, None))


def fold_rows(y: Tensor, x: Tensor, table: AdapterTable, adapter_ids: Tensor) -> Tensor:
    """The adapters of a plain module, in place: y [R, N], x [R, K], ids int32 [R]."""
    alike = torch.zeros_like(adapter_ids)
    if len(y) <= FEW_ROWS:
        return fold_down(y, x.contiguous(), table, AdapterRows(alike, adapter_ids.contiguous(), 1))
    with torch.cuda.device_of(y):
        route, _ = plan_sort(alike[:, None], 1, 64)
        source = order_rows(route, adapter_ids.contiguous(), table.slots, row_tile(len(y), 1, table.slots))
    return fold_down(y, x.contiguous(), table, source)
