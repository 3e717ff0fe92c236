"""Launches of the fold: shrink, and expand-and-fold, over planned (grouped) or single (gathered) rows.

Every function checks its arguments before it launches, and launches on the current stream. Nothing is read back.
`chained`: programs start while the kernel before still runs, and wait for it before they read anything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs

from fanfold.kernels.common.device import arch_of
from fanfold.kernels.lora import product
from fanfold.kernels.lora.checks import check_activation, check_source, check_window, check_x, check_y
from fanfold.kernels.lora.config import SPLIT, config_for, parts_for, takes_one_launch
from fanfold.kernels.lora.operands import Source, entries, item_count, operands_of, row_count, tile_of
from fanfold.kernels.lora.sizes import padded_rank
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import AdapterTable

Arguments = dict[str, Any]


def fold_gate_up(
    y1: Tensor,
    x: Tensor,
    table: AdapterTable,
    source: Source,
    activation: Activation | None = None,
    h: Tensor | None = None,
    *,
    unknown: Tensor | None = None,
    chained: bool = False,
) -> Tensor:
    """Gate and up of a layer: folds every row's change onto y1, and applies the activation if there is one.

    One launch where the table's ranks fit in one program (up to 32), else two; the same bits.

    Args:
        y1: [R, P*I], the base product, gate first; at sorted positions, or at the places of `AdapterRows`.
        x: [T, H], unquantised.
        table: of gate and up (P = 2), or of up alone.
        source: the batch's rows: `AdapterWork` of the plan, or `AdapterRows`.
        activation: None changes y1 in place. Else y1 stays as it is, and goes through the activation into h.
        h: [R, I], with an activation: all rows whose id is a slot's are written, those of the base are left.
        unknown: int32 [1] or None; counts tokens whose id is >= slots, where `source` is no plan (a plan counts).
        chained: see above.

    Returns:
        y1, or h.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    return _fold("fold_gate_up", y1, x, table, source, True, False, activation, h, unknown, chained)


def fold_down(
    y2: Tensor, h: Tensor, table: AdapterTable, source: Source, *, scatter: bool = False, chained: bool = False
) -> Tensor:
    """Down of a layer: folds every row's change onto y2, in place.

    Args:
        y2: [R, H], the base product, at sorted positions (places); with `scatter` at rows (token * top_k + slot).
            Or fp32 [parts, R, H], whose sum in order, rounded, is the base product: a changed row then is the first
            part, beside zeros.
        h: [R, I] at sorted positions (places).
        table: of down.
        source: as for `fold_gate_up`.
        scatter: where y2's rows lie.
        chained: see above.

    Returns:
        y2.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    return _fold("fold_down", y2, h, table, source, False, scatter, None, None, None, chained)


def shrink(
    op: str,
    x: Tensor,
    table: AdapterTable,
    source: Source,
    xa: Tensor,
    *,
    gather_x: bool,
    row_offset: int = 0,
    row_end: int | None = None,
    unknown: Tensor | None = None,
    chained: bool = False,
    lets_in: bool = False,
) -> None:
    """xa = act(x A^T) of the window [row_offset, row_end) of positions, both projections in one launch.

    Args:
        op: the operation's name, for errors.
        x: [T, K] with `gather_x`, else [R, K] at positions.
        table: of gate and up, or of one projection.
        source: the batch's rows.
        xa: scratch [P, cap, at least the padded max_rank], in x's dtype; the row of a position is position -
            row_offset. Rows without a pair, and columns behind a pair's padded rank, are not written.
        gather_x: x's row is the token of the position.
        row_offset: first position.
        row_end: behind the last position; None: R. An empty or inverted window does nothing.
        unknown: see `fold_gate_up`.
        chained: see above.
        lets_in: a chained launch behind this one starts once all programs of this one have, and finds complete what
            this one found; it must wait for xa itself.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    end = row_count(source) if row_end is None else row_end
    check_source(op, table, source, unknown)
    check_x(op, x, table, source, gather_x)
    check_window(op, table, source, xa, x.dtype, row_offset, end)
    arch = arch_of(x.device)
    if end <= row_offset:
        return
    arguments = shrink_arguments(x, table, source, xa, gather_x, row_offset, end, unknown, chained, arch, lets_in)
    _launch(product.shrink_kernel, item_count(source) * arguments["parts"], arguments, xa)


def expand(
    op: str,
    y: Tensor,
    table: AdapterTable,
    source: Source,
    xa: Tensor,
    *,
    row_offset: int = 0,
    row_end: int | None = None,
    scatter: bool = False,
    activation: Activation | None = None,
    h: Tensor | None = None,
    chained: bool = False,
) -> Tensor:
    """y = act(y + scale * act(xa B^T)) of the window's rows, in place; or h, the activation of it.

    Args:
        op: the operation's name, for errors.
        y: [R, P*N] at positions, with `scatter` at rows; or parts, as for `fold_down`.
        table: of gate and up, or of one projection.
        source: the batch's rows, as for shrink.
        xa: what shrink wrote for the same window.
        row_offset: first position.
        row_end: behind the last position; None: R.
        scatter: where y's rows lie.
        activation: as for `fold_gate_up`.
        h: as for `fold_gate_up`.
        chained: see above.

    Returns:
        y, or h.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    end = row_count(source) if row_end is None else row_end
    check_source(op, table, source)
    check_y(op, y, table, source)
    check_activation(op, table, source, activation, h)
    check_window(op, table, source, xa, table.dtype, row_offset, end)
    arch = arch_of(y.device)
    out = y if h is None else h
    if end <= row_offset:
        return out
    arguments = expand_arguments(y, out, table, source, xa, row_offset, end, scatter, activation, chained, arch)
    _launch(product.expand_kernel, item_count(source) * arguments["parts"], arguments, y)
    return out


def _fold(
    op: str,
    y: Tensor,
    x: Tensor,
    table: AdapterTable,
    source: Source,
    gather_x: bool,
    scatter: bool,
    activation: Activation | None,
    h: Tensor | None,
    unknown: Tensor | None,
    chained: bool,
) -> Tensor:
    """Both steps, of all rows."""
    check_source(op, table, source, unknown)
    check_x(op, x, table, source, gather_x)
    check_y(op, y, table, source)
    check_activation(op, table, source, activation, h)
    arch = arch_of(x.device)
    if not takes_one_launch(table.max_rank):
        xa = x.new_empty((table.projections, row_count(source), padded_rank(table.max_rank)))
        shrink(op, x, table, source, xa, gather_x=gather_x, unknown=unknown, chained=chained)
        return expand(op, y, table, source, xa, scatter=scatter, activation=activation, h=h, chained=chained)
    out = y if h is None else h
    arguments = fold_arguments(y, out, x, table, source, gather_x, scatter, activation, unknown, chained, arch)
    _launch(product.fold_kernel, item_count(source) * arguments["parts"], arguments, y)
    return out


def shrink_arguments(
    x: Tensor,
    table: AdapterTable,
    source: Source,
    xa: Tensor,
    gather_x: bool,
    row_offset: int,
    row_end: int,
    unknown: Tensor | None,
    chained: bool,
    arch: int,
    lets_in: bool = False,
) -> Arguments:
    """Arguments and launch options of `shrink_kernel`, by name; what is compiled depends on nothing else."""
    config = config_for(table.max_rank, tile_of(source), x.dtype, arch)
    parts = -(-padded_rank(table.max_rank) // config.block_r)
    return _common(table, source, parts, chained) | dict(
        x_ptr=x,
        xa_ptr=xa,
        unknown_ptr=unknown,
        top_k=source.top_k,
        K=table.k,
        row_offset=row_offset,
        row_end=row_end,
        stride_x=x.stride(0),
        stride_xa=xa.stride(1),
        stride_half=xa.stride(0),
        GATHER_X=gather_x,
        BLOCK_R=config.block_r,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        LETS_IN=lets_in,
        num_warps=config.num_warps,
    )


def expand_arguments(
    y: Tensor,
    out: Tensor,
    table: AdapterTable,
    source: Source,
    xa: Tensor,
    row_offset: int,
    row_end: int,
    scatter: bool,
    activation: Activation | None,
    chained: bool,
    arch: int,
) -> Arguments:
    """The same of `expand_kernel`."""
    config = config_for(table.max_rank, tile_of(source), xa.dtype, arch)
    parts = -(-table.n // config.block_n)
    arguments = _common(table, source, parts, chained) | _outputs(y, out, table, activation, scatter)
    return arguments | dict(
        xa_ptr=xa,
        row_offset=row_offset,
        row_end=row_end,
        stride_xa=xa.stride(1),
        stride_half=xa.stride(0),
        BLOCK_R=config.block_r,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )


def fold_arguments(
    y: Tensor,
    out: Tensor,
    x: Tensor,
    table: AdapterTable,
    source: Source,
    gather_x: bool,
    scatter: bool,
    activation: Activation | None,
    unknown: Tensor | None,
    chained: bool,
    arch: int,
) -> Arguments:
    """The same of `fold_kernel`."""
    config = config_for(table.max_rank, tile_of(source), x.dtype, arch)
    tiles = -(-table.n // config.block_n)
    parts = parts_for(item_count(source), tiles)
    tiles = -(-tiles // parts)
    arguments = _common(table, source, parts, chained) | _outputs(y, out, table, activation, scatter)
    return arguments | dict(
        x_ptr=x,
        unknown_ptr=unknown,
        top_k=source.top_k,
        K=table.k,
        stride_x=x.stride(0),
        tiles=tiles,
        ONE_TILE=tiles == 1,
        GATHER_X=gather_x,
        BLOCK_R=config.block_r,
        BLOCK_K=config.block_k,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def _common(table: AdapterTable, source: Source, parts: int, chained: bool) -> Arguments:
    """What all three kernels take."""
    operands, find = operands_of(source)
    options = {"launch_pdl": True} if chained else {}
    return options | dict(
        table=entries(table),
        source=operands,
        slots=table.slots,
        experts=table.a.shape[2],
        FIND=find,
        HALVES=table.projections,
        BLOCK_M=tile_of(source),
        SPLIT=SPLIT,
        parts=parts,
        CHAINED=chained,
        enable_fp_fusion=False,  # the multiply by the scale rounds before the add
    )


def _outputs(y: Tensor, out: Tensor, table: AdapterTable, activation: Activation | None, scatter: bool) -> Arguments:
    """What expand and fold write."""
    return dict(
        y_ptr=y,
        h_ptr=out,
        N=table.n,
        stride_y=y.stride(-2),
        stride_part=y.stride(0) if y.dim() == 3 else 0,
        stride_h=out.stride(0),
        PARTS=y.shape[0] if y.dim() == 3 else 1,
        alpha=0.0 if activation is None else activation.alpha,
        limit=0.0 if activation is None else activation.limit,
        ASSEMBLY=not knobs.runtime.interpret,
        SCATTER=scatter,
        ACTIVATION=None if activation is None else activation.kind,
    )


def _launch(kernel: Any, programs: int, arguments: Arguments, on: Tensor) -> None:
    """One launch on the current stream; none where there is nothing to do."""
    if programs == 0:
        return
    with torch.cuda.device_of(on):
        kernel[(programs,)](**arguments)
