"""Launches of the Hopper product: arguments checked, one launch a projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped.sm90 import product
from fanfold.kernels.grouped.sm90.checks import check_arguments, check_device
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.items import WorkItems
from fanfold.kernels.grouped.sm90.prepare import FragmentWeights


def grouped_gate_up(
    x: Tensor, weights: FragmentWeights, work: WorkItems, top_k: int, config: Sm90Config, chained: bool = False
) -> Tensor:
    """h = act( silu(fp32(gate)) * fp32(up) ), gate and up = act(x[token] . W13[e]^T), of all rows.

    Args:
        x: [T, H], bf16, or fp16 for integer weights; contiguous.
        weights: gate and up.
        work: tiles of `config.block_t` rows, or single rows.
        top_k: k.
        config: of the tuned table.
        chained: programs start while the kernel before still runs, and wait for it before they read work items.
            Weights are read after that too.

    Returns:
        h [R, I] at sorted positions, in x's dtype. Positions that no work item holds are not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: x is not on a Hopper GPU.
    """
    op = "grouped_gate_up on sm_90"
    check_arguments(op, "x", x, weights, work, config, halves=2)
    if top_k < 1 or x.shape[0] * top_k != work.total:
        raise ArgumentError(
            f"{op}: work",
            found=f"{work.total} rows",
            expected=f"{x.shape[0]} tokens of x * top_k {top_k}",
            next_step="Pass the work items of these tokens.",
        )
    check_device(op, x)
    h = x.new_empty((work.total, weights.n))
    return _launch(x, weights, work, h, config, chained, top_k=top_k)


def grouped_down(
    h: Tensor, weights: FragmentWeights, work: WorkItems, config: Sm90Config, chained: bool = False
) -> Tensor:
    """y2 = act(h . W2[e]^T) of all rows.

    Args:
        h: [R, I] at sorted positions, bf16, or fp16 for integer weights; contiguous.
        weights: down.
        work: as for gate_up.
        config: of the tuned table.
        chained: as for gate_up, but work items and weights are read before the wait: the kernel before must be one
            that began after both were complete, as gate_up is.

    Returns:
        y2 [R, H] at rows (token * top_k + slot), in h's dtype; with `config.parts` > 1 fp32 [parts, R, H], not
        rounded, which `kernels.combine` adds in order. Rows that no work item holds are not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: h is not on a Hopper GPU.
    """
    op = "grouped_down on sm_90"
    check_arguments(op, "h", h, weights, work, config, halves=1)
    if h.shape[0] != work.total:
        raise ArgumentError(
            f"{op}: h",
            found=f"{h.shape[0]} rows",
            expected=f"{work.total}, the rows of the work items",
            next_step="Pass the rows of this plan, in sorted order.",
        )
    check_device(op, h)
    if config.parts == 1:
        y2 = h.new_empty((work.total, weights.n))
    else:
        y2 = h.new_empty((config.parts, work.total, weights.n), dtype=torch.float32)
    return _launch(h, weights, work, y2, config, chained)


def launch_arguments(
    x: Tensor,
    weights: FragmentWeights,
    work: WorkItems,
    y: Tensor,
    config: Sm90Config,
    chained: bool,
    top_k: int | None = None,
) -> dict[str, Any]:
    """Arguments and launch options of `grouped_int4_sm90`, by name; what is compiled depends on nothing else.

    Args:
        x: [T, K] or [R, K].
        weights: the projection.
        work: items.
        y: [R, ...] or [parts, R, ...].
        config: tile sizes.
        chained: see `grouped_gate_up`.
        top_k: k for gate_up, None for down.
    """
    fp4 = weights.fp4_group
    no_zeros = weights.words  # a pointer that is not read
    arguments: dict[str, Any] = dict(
        x_ptr=x,
        w_ptr=weights.words,
        s_ptr=weights.scales,
        z_ptr=weights.global_scale if fp4 else no_zeros if weights.zeros is None else weights.zeros,
        y_ptr=y,
        work_ptr=work.items,
        rows_ptr=work.rows,
        slots=work.items.shape[0],
        NR=weights.rows,
        stride_x=weights.k,
        stride_y=weights.n,
        stride_split=y.stride(0) if config.parts > 1 else 0,
        top_k=1 if top_k is None else top_k,
        K=weights.k,
        G=weights.format.group_size,
        BT=config.block_t,
        BT_MIN=config.smallest_t,
        WGS=config.warpgroups,
        SLABS=config.slabs,
        KX=config.block_k,
        STAGES=config.stages,
        GROUP=config.together,
        SPLIT=config.parts,
        POST=config.scale_on_sum,
        GATE_UP=top_k is not None,
        DIRECT=work.single,
        ZEROS=weights.zeros is not None,
        FP4=fp4,
        PDL=chained,
        num_warps=4 * config.warpgroups,
    )
    return {**arguments, "launch_pdl": True} if chained else arguments


def _launch(
    x: Tensor,
    weights: FragmentWeights,
    work: WorkItems,
    y: Tensor,
    config: Sm90Config,
    chained: bool,
    top_k: int | None = None,
) -> Tensor:
    """One launch on the current stream; none where there is nothing to do."""
    if work.total == 0 or weights.num_experts == 0:
        return y
    grid = (work.items.shape[0] * (weights.rows // config.rows) * config.parts,)
    with torch.cuda.device_of(y):
        product.grouped_int4_sm90[grid](**launch_arguments(x, weights, work, y, config, chained, top_k))
    return y
