"""Launches of the Hopper product: arguments checked, one launch a projection."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.common.aside import check_aside
from fanfold.kernels.grouped.sm90 import product
from fanfold.kernels.grouped.sm90.checks import ALIGNMENT, LARGEST, check_arguments, check_device
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.expand import POINTERS, SIZES, adapter_values, check_expand
from fanfold.kernels.grouped.sm90.reorder import reorder
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import Aside, Expand
from fanfold.spec.work import WorkItems


def grouped_gate_up(
    x: Tensor,
    weights: FragmentWeights,
    work: WorkItems,
    top_k: int,
    config: Sm90Config,
    activation: Activation | None,
    chained: bool = False,
    aside: Aside | None = None,
    expand: Expand | None = None,
) -> Tensor:
    """y1 = act(x[token] . W13[e]^T + bias) of all rows, or h = act(activation(y1)).

    Args:
        x: [T, H], bf16, or fp16 for integer weights; contiguous.
        weights: gate and up, or up alone.
        work: tiles of `config.block_t` rows, or single rows.
        top_k: k.
        config: of `config_for`.
        activation: None gives y1. Else h: y1 is rounded in between, so that the bits are those of two steps.
        chained: programs start while the kernel before still runs, and wait for it before they read work items.
            Weights are read after that too.
        aside: with an activation and a plan, y1 of rows that have an adapter goes there, and their h is not written.
        expand: for single rows, adapters that are folded onto y1 before the activation. `chained` then is about the
            kernel that makes xa: it must have begun after ids and x were complete, and is waited for behind the sums.

    Returns:
        y1 [R, P*I] (gate first, then up) or h [R, I] at sorted positions, in x's dtype. Positions that no work item
        holds are not written. Columns are in the order `weights.hidden_order`.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: x is not on a Hopper GPU.
    """
    op = "grouped_gate_up on sm_90"
    check_arguments(op, "x", x, weights, work, config, gate_up=True)
    if top_k < 1 or x.shape[0] * top_k != work.total:
        raise ArgumentError(
            f"{op}: work",
            found=f"{work.total} rows",
            expected=f"{x.shape[0]} tokens of x * top_k {top_k}",
            next_step="Pass the work items of these tokens.",
        )
    if activation is not None and activation.gated != (weights.halves == 2):
        raise ArgumentError(
            f"{op}: activation",
            found=f"{activation.kind} with {weights.halves} halves",
            expected="a gated activation for gate and up, relu2 for up alone",
            next_step="Pass the activation of the layer that these weights belong to.",
        )
    check_aside(op, aside, x, weights.n * weights.halves, top_k, activation)
    if aside is not None and work.single:
        raise ArgumentError(
            f"{op}: aside",
            found="single rows",
            expected="work items of a plan",
            next_step="Pass an Expand for single rows.",
        )
    check_expand(op, expand, x, work, weights, config)
    check_device(op, x)
    if weights.order is not None:
        x = reorder(x, weights.order, work, top_k)
        chained = chained and expand is None  # x itself is of the launch before
    y = x.new_empty((work.total, weights.n * (weights.halves if activation is None else 1)))
    return _launch(x, weights, work, y, config, chained, top_k, activation, aside, expand)


def grouped_down(
    h: Tensor,
    weights: FragmentWeights,
    work: WorkItems,
    config: Sm90Config,
    chained: bool = False,
    expand: Expand | None = None,
) -> Tensor:
    """y2 = act(h . W2[e]^T + bias) of all rows.

    Args:
        h: [R, I] at sorted positions, bf16, or fp16 for integer weights; contiguous; columns in the order
            `weights.hidden_order`, as gate_up leaves them.
        weights: down.
        work: as for gate_up.
        config: of the tuned table.
        chained: as for gate_up, but work items and weights are read before the wait: the kernel before must be one
            that began after both were complete, as gate_up is.
        expand: as for gate_up; for one part alone.

    Returns:
        y2 [R, H] at rows (token * top_k + slot), in h's dtype; with `config.parts` > 1 fp32 [parts, R, H], not
        rounded, which `kernels.combine` adds in order. Rows that no work item holds are not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: h is not on a Hopper GPU.
    """
    op = "grouped_down on sm_90"
    check_arguments(op, "h", h, weights, work, config, gate_up=False)
    if h.shape[0] != work.total:
        raise ArgumentError(
            f"{op}: h",
            found=f"{h.shape[0]} rows",
            expected=f"{work.total}, the rows of the work items",
            next_step="Pass the rows of this plan, in sorted order.",
        )
    if weights.halves != 1 or weights.order is not None:
        raise ArgumentError(
            f"{op}: weights",
            found=f"{weights.halves} halves, {'no order' if weights.order is None else 'an order'} of inputs",
            expected="1 half, and inputs in the order of h",
            next_step="Pass the down projection that prepare_layer made.",
        )
    check_expand(op, expand, h, work, weights, config)
    check_device(op, h)
    if config.parts == 1:
        y2 = h.new_empty((work.total, weights.n))
    else:
        y2 = h.new_empty((config.parts, work.total, weights.n), dtype=torch.float32)
    return _launch(h, weights, work, y2, config, chained, expand=expand)


def launch_arguments(
    x: Tensor,
    weights: FragmentWeights,
    work: WorkItems,
    y: Tensor,
    config: Sm90Config,
    chained: bool,
    top_k: int | None = None,
    activation: Activation | None = None,
    aside: Aside | None = None,
    expand: Expand | None = None,
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
        activation: behind gate_up.
        aside, expand: for rows that have an adapter.
    """
    values = _values(x, weights, work, y, config, 1 if top_k is None else top_k, activation, aside, expand)
    kind = None if activation is None else activation.kind
    constants = _constants(
        weights, config, chained, work.single, top_k is not None, kind, aside is not None, expand is not None
    )
    options: dict[str, Any] = {"num_warps": 4 * config.warpgroups, **({"launch_pdl": True} if chained else {})}
    return {**dict(zip(VALUES, values, strict=True)), **constants, **options}


_KERNEL = cast(Any, product.grouped_int4_sm90)
VALUES = (
    *("x_ptr", "w_ptr", "s_ptr", "z_ptr", "b_ptr", "y_ptr", *POINTERS, "work_ptr", "rows_ptr", "slots", "experts"),
    *("N", "NR", "stride_x", "stride_y", "stride_split", "top_k", *SIZES, "alpha", "limit"),
)
"""Arguments of the kernel that are not constants, in its order."""


def _values(
    x: Tensor,
    weights: FragmentWeights,
    work: WorkItems,
    y: Tensor,
    config: Sm90Config,
    top_k: int,
    activation: Activation | None,
    aside: Aside | None,
    expand: Expand | None,
) -> tuple[Any, ...]:
    nothing = weights.words  # a pointer that is not read
    second = weights.global_scale if weights.fp4_group else weights.zeros
    pointers, sizes = adapter_values(aside, expand, nothing)
    return (
        x,
        weights.words,
        weights.scales,
        nothing if second is None else second,
        nothing if weights.bias is None else weights.bias,
        y,
        *pointers,
        work.items,
        work.rows,
        work.items.shape[0],
        weights.num_experts,
        weights.n,
        weights.rows,
        weights.k,
        y.shape[-1],
        y.stride(0) if config.parts > 1 else 0,
        top_k,
        *sizes,
        0.0 if activation is None else activation.alpha,
        0.0 if activation is None else activation.limit,
    )


def _constants(
    weights: FragmentWeights,
    config: Sm90Config,
    chained: bool,
    single: bool,
    gate_up: bool,
    kind: str | None,
    aside: bool,
    folds: bool,
) -> dict[str, Any]:
    return dict(
        K=weights.padded_k,
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
        GATE_UP=gate_up,
        GATHER=gate_up and weights.order is None,
        HALVES=weights.halves,
        ACT=kind,
        ASIDE=aside,
        FOLD=folds,
        BIAS=weights.bias is not None,
        DIRECT=single,
        ZEROS=weights.zeros is not None,
        SHORT=weights.short_scales and not config.scale_on_sum,
        FP4=weights.fp4_group,
        PAD_K=weights.padded_k != weights.k,
        PDL=chained,
    )


def _launch(
    x: Tensor,
    weights: FragmentWeights,
    work: WorkItems,
    y: Tensor,
    config: Sm90Config,
    chained: bool,
    top_k: int | None = None,
    activation: Activation | None = None,
    aside: Aside | None = None,
    expand: Expand | None = None,
) -> Tensor:
    """One launch on the current stream; none where there is nothing to do.

    Triton looks a kernel up by all of its arguments, 30 us of host time. Here it is kept with the weights, by what they
    do not tell.
    """
    if work.total == 0 or weights.num_experts == 0:
        return y
    grid = (work.items.shape[0] * (weights.rows // config.rows) * config.parts, 1, 1)
    kind = None if activation is None else activation.kind
    read = work.items, work.rows, *(() if expand is None else (expand.adapter_ids, expand.xa))
    aligned = tuple(tensor.data_ptr() % ALIGNMENT == 0 for tensor in read)
    wide = y.numel() > LARGEST
    key = (
        config,
        chained,
        work.single,
        top_k is None,
        kind,
        aside is None,
        expand is None,
        x.dtype,
        work.items.dtype,
        aligned,
        wide,
    )
    known = weights.launches.get(key)
    with torch.cuda.device_of(y):
        if known is None:
            arguments = launch_arguments(x, weights, work, y, config, chained, top_k, activation, aside, expand)
            kernel = _KERNEL[grid](**arguments)
            constants = _constants(
                weights, config, chained, work.single, top_k is not None, kind, aside is not None, expand is not None
            )
            weights.launches[key] = kernel, tuple(constants.values())
        else:
            kernel, constants = known
            values = _values(x, weights, work, y, config, 1 if top_k is None else top_k, activation, aside, expand)
            kernel[grid](*values, *constants)
    return y
