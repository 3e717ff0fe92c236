"""Checks of the arguments of the fold, before any launch; shapes and dtypes alone, so nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.lora.operands import Source, row_count
from fanfold.kernels.lora.sizes import ROW_TILES, padded_rank, work_items
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import AdapterTable, AdapterWork
from fanfold.spec.route import Route

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_plan(
    route: Route, adapter_ids: Tensor | None, slots: int, tile: int, one_slot: int, unknown: Tensor | None
) -> None:
    """Of `plan.order_rows`.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    op, rows, device = "order_rows", route.sorted_rows.numel(), route.sorted_rows.device
    if route.top_k < 1 or rows % route.top_k:
        raise _wrong(op, "route", f"{rows} rows with top_k {route.top_k}", "T * top_k rows")
    _int32(op, "route.expert_offsets", route.expert_offsets, [route.num_experts + 1], device)
    _int32(op, "route.sorted_rows", route.sorted_rows, [rows], device)
    if slots < 1:
        raise _wrong(op, "slots", str(slots), "at least 1")
    if tile not in ROW_TILES:
        raise _wrong(op, "tile", str(tile), f"one of {', '.join(map(str, ROW_TILES))}")
    _ids(op, adapter_ids, rows // route.top_k, slots, one_slot, device)
    if unknown is not None:
        _int32(op, "unknown", unknown, [1], device)


def check_source(op: str, table: AdapterTable, source: Source, unknown: Tensor | None = None) -> None:
    """Of the rows of a launch.

    Raises:
        ArgumentError: as above.
    """
    rows, device = row_count(source), table.a.device
    if source.top_k < 1 or rows % source.top_k:
        raise _wrong(op, "rows", f"{rows} rows with top_k {source.top_k}", "T * top_k rows")
    if isinstance(source, AdapterWork):
        if source.slots != table.slots:
            raise _wrong(op, "work", f"rows ordered by {source.slots} slots", f"{table.slots}, the slots of the table")
        if source.tile not in ROW_TILES:
            raise _wrong(op, "work.tile", str(source.tile), f"one of {', '.join(map(str, ROW_TILES))}")
        _int32(op, "work.items", source.items, [source.items.shape[0], 4], device)
        most = work_items(rows, rows, table.slots, source.tile)
        if source.items.shape[0] > most:
            raise _wrong(op, "work.items", f"{source.items.shape[0]} items", f"at most {most} for {rows} rows")
        _int32(op, "work.positions", source.positions, [rows], device)
        _int32(op, "work.rows", source.rows, [rows], device)
    else:
        ids = source.expert_ids
        if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1 or not ids.is_contiguous():
            raise _wrong(op, "expert_ids", _describe(ids), "contiguous int32 or int64 [T * top_k]")
        _same_device(op, "expert_ids", ids, device)
        _ids(op, source.adapter_ids, rows // source.top_k, table.slots, source.one_slot, device)
        if source.sorted_rows is not None:
            _int32(op, "sorted_rows", source.sorted_rows, [rows], device)
    if unknown is not None:
        _int32(op, "unknown", unknown, [1], device)


def check_x(op: str, x: Tensor, table: AdapterTable, source: Source, gather_x: bool) -> None:
    """Of the input: a row a token, or a row a position.

    Raises:
        ArgumentError: as above.
    """
    rows = row_count(source) // source.top_k if gather_x else row_count(source)
    _matrix(op, "x" if gather_x else "h", x, rows, table.k, table)


def check_y(op: str, y: Tensor, table: AdapterTable, source: Source) -> None:
    """Of the base product, in place; of one projection it may be in parts.

    Raises:
        ArgumentError: as above.
    """
    rows, columns = row_count(source), table.projections * table.n
    if y.dim() != 3 or table.projections == 2:
        _matrix(op, "y", y, rows, columns, table)
    elif y.dtype != torch.float32 or list(y.shape[1:]) != [rows, columns] or not y.is_contiguous():
        raise _wrong(op, "y", _describe(y), f"contiguous float32 [parts, {rows}, {columns}]")
    else:
        _same_device(op, "y", y, table.a.device)


def check_activation(
    op: str, table: AdapterTable, source: Source, activation: Activation | None, h: Tensor | None
) -> None:
    """Whether the activation belongs to these projections, and of where its rows go.

    Raises:
        ArgumentError: as above.
    """
    if activation is not None and activation.gated != (table.projections == 2):
        raise _wrong(
            op,
            "activation",
            f"{activation.kind} behind {table.projections} projections",
            "a gated activation behind gate and up, relu2 behind up alone",
        )
    if (activation is None) != (h is None):
        found = "h without an activation" if activation is None else f"{activation.kind} without h"
        raise _wrong(op, "h", found, "both or neither")
    if h is not None:
        _matrix(op, "h", h, row_count(source), table.n, table)


def check_window(
    op: str, table: AdapterTable, source: Source, xa: Tensor, dtype: torch.dtype, offset: int, end: int
) -> None:
    """Of the scratch, and of the window that it must hold.

    Raises:
        ArgumentError: as above.
    """
    rank = padded_rank(table.max_rank)
    expected = f"contiguous {_name(dtype)} [{table.projections}, cap, at least {rank}]"
    if xa.dim() != 3 or xa.shape[0] != table.projections or xa.shape[2] < rank or xa.dtype != dtype:
        raise _wrong(op, "xa", _describe(xa), expected)
    if not xa.is_contiguous():
        raise _wrong(op, "xa", _describe(xa), expected)
    _same_device(op, "xa", xa, table.a.device)
    rows = row_count(source)
    if offset < 0 or (end > rows and end > offset):
        raise _wrong(op, "window", f"[{offset}, {end})", f"a part of [0, {rows})")
    if end - offset > xa.shape[1]:
        raise _wrong(op, "window", f"{end - offset} rows", f"at most {xa.shape[1]}, the rows of xa")


def _matrix(op: str, what: str, found: Tensor, rows: int, columns: int, table: AdapterTable) -> None:
    if table.dtype not in DTYPES:
        raise _wrong(op, "table", f"pairs in {_name(table.dtype)}", "float16, bfloat16 or float32")
    if list(found.shape) != [rows, columns] or found.dtype != table.dtype:
        raise _wrong(op, what, _describe(found), f"{_name(table.dtype)} [{rows}, {columns}], as the table's pairs are")
    if columns > 1 and found.stride(1) != 1:
        raise _wrong(op, what, f"strides {found.stride()}", "the values of one row one behind the other")
    _same_device(op, what, found, table.a.device)


def _ids(op: str, adapter_ids: Tensor | None, tokens: int, slots: int, one_slot: int, device: torch.device) -> None:
    if adapter_ids is None:
        if one_slot >= slots:
            raise _wrong(op, "one_slot", str(one_slot), f"below {slots}, or -1 for the base")
        return
    if one_slot != -1:
        raise _wrong(op, "one_slot", f"{one_slot} beside adapter_ids", "one of the two")
    _int32(op, "adapter_ids", adapter_ids, [tokens], device)


def _int32(op: str, what: str, found: Tensor, shape: list[int], device: torch.device) -> None:
    if list(found.shape) != shape or found.dtype != torch.int32 or not found.is_contiguous():
        raise _wrong(op, what, _describe(found), f"contiguous int32 {shape}")
    _same_device(op, what, found, device)


def _same_device(op: str, what: str, found: Tensor, device: torch.device) -> None:
    if found.device != device:
        raise _wrong(op, what, str(found.device), f"{device}, where the other tensors are")


def _wrong(op: str, what: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"{op}: {what}",
        found=found,
        expected=expected,
        next_step="Pass one layer's table, and the rows and activations of one batch.",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return f"{_name(tensor.dtype)} {list(tensor.shape)}{strides}"
