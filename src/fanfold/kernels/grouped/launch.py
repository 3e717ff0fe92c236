"""Launches of the grouped product: arguments checked, operands laid out, one launch a projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.common.aside import check_aside
from fanfold.kernels.common.device import NATIVE_E4M3, arch_of
from fanfold.kernels.common.layouts import layout, layout_of_8_bit_product
from fanfold.kernels.common.operands import RowScales
from fanfold.kernels.grouped.act_order import permuted
from fanfold.kernels.grouped.checks import check_arguments, check_scale_on_sum
from fanfold.kernels.grouped.product import grouped_product
from fanfold.kernels.grouped.quantize import quantize_rows
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import Aside
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weights import ProjectionWeights
from fanfold.spec.work import WorkList

TOGETHER = 8
"""Work items that pass one weight tile one after the other, while it is in the L2 cache."""
NO_SCALES = RowScales(None, 0, 0, 1)
SUMS = 64
"""Registers a thread that a sum takes, from which on three do not fit: those of gate, up and, with 8 bits, a step."""


def grouped_gate_up(
    x: Tensor,
    weights: ProjectionWeights,
    work: WorkList,
    sorted_rows: Tensor,
    top_k: int,
    config: LaunchConfig,
    activation: Activation | None = None,
    permutation: Tensor | None = None,
    w8a8: bool = False,
    aside: Aside | None = None,
) -> Tensor:
    """y1 = act(x[token] . W13[e]^T + bias) of all rows, or h = act(activation(y1)).

    Args:
        x: [T, H] in fp16, bf16 or fp32; rows may lie apart.
        weights: gate and up (or up alone), [E, P, ...].
        work: tiles of `config.block_t` sorted positions.
        sorted_rows: int32 [R], R = T * top_k; sorted position -> row = token * top_k + slot.
        top_k: k.
        config: of `configs.config_for`.
        activation: None gives y1. Else h: y1 is rounded in between, so that the bits are those of two steps.
        permutation: int32 [E, H] of `act_order.sort_by_group`, which made the weights; a launch of its own
            brings x into that order.
        w8a8: quantise x to E4M3 first (a launch of its own); FP8 weights alone.
        aside: with an activation, y1 of the rows that have an adapter goes there, and their h is not written.

    Returns:
        y1 [R, P*I] (gate first) or h [R, I] at sorted positions, in x's dtype. Positions that no work item holds
        are not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    op, rows = "grouped_gate_up", sorted_rows.numel()
    check_arguments(op, "x", x, weights, work, sorted_rows, config)
    if top_k < 1 or x.shape[0] * top_k != rows:
        raise ArgumentError(
            f"{op}: sorted_rows",
            found=f"{rows} rows",
            expected=f"{x.shape[0]} tokens of x * top_k {top_k}",
            next_step="Pass the plan of these tokens.",
        )
    check_activation(op, weights, activation)
    check_aside(op, aside, x, weights.n * weights.halves, top_k, activation)
    out = x.new_empty((rows, weights.n * (weights.halves if activation is None else 1)))
    return launch(
        op, x, weights, work, sorted_rows, config, out, top_k=top_k, activation=activation, permutation=permutation,
        w8a8=w8a8, aside=aside,
    )  # fmt: skip


def grouped_down(
    h: Tensor,
    weights: ProjectionWeights,
    work: WorkList,
    sorted_rows: Tensor,
    config: LaunchConfig,
    scatter: bool = False,
    row_weights: Tensor | None = None,
    permutation: Tensor | None = None,
    w8a8: bool = False,
) -> Tensor:
    """y2 = act(h . W2[e]^T + bias) of all rows, or act(row_weight * y2).

    Args:
        h: [R, I] at sorted positions, in fp16, bf16 or fp32; rows may lie apart.
        weights: down, [E, 1, ...].
        work: tiles of `config.block_t` sorted positions.
        sorted_rows: int32 [R], sorted position -> row.
        config: of `configs.config_for`.
        scatter: write to rows (token * top_k + slot) instead of sorted positions.
        row_weights: fp32 [R] by row, the router's; multiplies y2 in fp32 after y2 was rounded.
        permutation: int32 [E, I], as for `grouped_gate_up`.
        w8a8: quantise h to E4M3 first (a launch of its own); FP8 weights alone.

    Returns:
        y2 [R, H] in h's dtype. Positions (or rows) that no work item holds are not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    op = "grouped_down"
    check_arguments(op, "h", h, weights, work, sorted_rows, config, row_weights)
    if h.shape[0] != sorted_rows.shape[0] or weights.halves != 1:
        raise ArgumentError(
            f"{op}: h",
            found=f"{h.shape[0]} rows for {sorted_rows.shape[0]} sorted rows and {weights.halves} halves",
            expected="a row for each sorted row, and weights of one half",
            next_step="Pass the rows of this plan, in sorted order, and the down projection.",
        )
    out = h.new_empty((h.shape[0], weights.n))
    return launch(
        op, h, weights, work, sorted_rows, config, out, scatter=scatter, row_weights=row_weights,
        permutation=permutation, w8a8=w8a8,
    )  # fmt: skip


def check_activation(op: str, weights: ProjectionWeights, activation: Activation | None) -> None:
    """Whether the activation goes with gate and up, or up alone.

    Raises:
        ArgumentError: it does not.
    """
    if activation is not None and activation.gated != (weights.halves == 2):
        raise ArgumentError(
            f"{op}: activation",
            found=f"{activation.kind} with {weights.halves} halves",
            expected="a gated activation for gate and up, relu2 for up alone",
            next_step="Pass the activation of the layer that these weights belong to.",
        )


def launch(
    op: str,
    x: Tensor,
    weights: ProjectionWeights,
    work: WorkList | Tensor,
    sorted_rows: Tensor | None,
    config: LaunchConfig,
    out: Tensor,
    top_k: int | None = None,
    activation: Activation | None = None,
    scatter: bool = False,
    row_weights: Tensor | None = None,
    permutation: Tensor | None = None,
    w8a8: bool = False,
    aside: Aside | None = None,
) -> Tensor:
    """One product on the current stream, into `out`; nothing where there is nothing to do.

    Args:
        op, x, weights, config, out, activation, scatter, row_weights, permutation, w8a8, aside: as for the functions
            above.
        work: tiles, or the expert of each row, [R].
        sorted_rows: int32 [R]; None without a plan.
        top_k: x's row is the token of the position; None: the position.

    Raises:
        ArgumentError: as for `launch_arguments`; or permutation is not int32 [E, K].
        UnavailableError: the tensors are where no kernel runs.
    """
    arch = arch_of(x.device)
    scales = None
    if permutation is not None:
        x, top_k = permuted(op, x, permutation, weights.num_experts, work, sorted_rows, top_k), None
    if w8a8:
        x, scales = quantize_rows(x, weights.format.activation_group(weights.k))
    arguments = launch_arguments(
        op, x, weights, work, sorted_rows, config, out, arch,
        top_k=top_k, activation=activation, scatter=scatter, row_weights=row_weights, x_scales=scales,
        aside=aside,
    )  # fmt: skip
    if out.shape[0] == 0 or weights.num_experts == 0:
        return out
    halves = weights.halves if activation is None else 1
    grid = (arguments["slots"] * -(-weights.n // config.block_n) * halves,)
    with torch.cuda.device_of(out):
        grouped_product[grid](**arguments)
    return out


def launch_arguments(
    op: str,
    x: Tensor,
    weights: ProjectionWeights,
    work: WorkList | Tensor,
    sorted_rows: Tensor | None,
    config: LaunchConfig,
    out: Tensor,
    arch: int,
    top_k: int | None = None,
    activation: Activation | None = None,
    scatter: bool = False,
    row_weights: Tensor | None = None,
    x_scales: RowScales | None = None,
    aside: Aside | None = None,
) -> dict[str, Any]:
    """Arguments and launch options of `grouped_product`, by name; what the device compiles depends on nothing else.

    Args:
        op: the operation, for errors.
        x: [T, K] or [R, K]; E4M3 bytes with x_scales.
        weights: the projection.
        work: tiles, or the expert of each row.
        sorted_rows: int32 [R]; None without a plan.
        config: tile sizes.
        out: [R, ...].
        arch: compute capability; 0 in the interpreter.
        top_k: x's row is the token of the position; None: the position.
        activation: behind the product.
        scatter: write to rows.
        row_weights: fp32 [R], multiply rounded outputs.
        x_scales: of activations in 8 bits.
        aside: for rows that have an adapter.

    Raises:
        ArgumentError: a tensor of the weights is not what the format says, or the config does not fit its groups.
    """
    w8a8 = x_scales is not None
    packed = layout_of_8_bit_product(weights) if w8a8 else layout(weights)
    run = packed.run or config.block_k
    scale_at = None
    if packed.scale_kind is not None:
        scale_at = "end" if packed.run == 0 else "sum" if config.scale_on_sum else "weight"
        check_scale_on_sum(op, config, run, w8a8 and packed.run > 0)
    as_they_lie = arch >= NATIVE_E4M3 if w8a8 else packed.codes.ptr.dtype == x.dtype
    planned = isinstance(work, WorkList)
    slots = work.slots if planned else work
    return dict(
        x_ptr=x,
        xs=x_scales or NO_SCALES,
        y_ptr=out,
        aside=aside,
        w=packed.codes,
        s=packed.scales,
        z=packed.zeros,
        order=packed.order,
        m_ptr=packed.matrix_scale,
        b_ptr=weights.bias,
        work_ptr=slots,
        rows_ptr=sorted_rows,
        rw_ptr=row_weights,
        slots=slots.shape[0],
        experts=weights.num_experts,
        N=weights.n,
        K=weights.k,
        top_k=1 if top_k is None else top_k,
        alpha=0.0 if activation is None else activation.alpha,
        limit=0.0 if activation is None else activation.limit,
        stride_x=x.stride(0),
        stride_y=out.stride(0),
        CODES=packed.read_codes,
        ZEROS=packed.read_zeros,
        ZERO=packed.zero,
        SCALES=packed.scale_kind,
        SCALE_AT=scale_at,
        BITS=packed.bits,
        V1=packed.v1,
        DIVIDE=packed.divide,
        NATIVE_E4M3=arch >= NATIVE_E4M3,
        GROUP=packed.scales.group_size if packed.run else 0,
        RUN=min(run, config.block_k),
        HALVES=weights.halves,
        ACTIVATION=None if activation is None else activation.kind,
        PLANNED=planned,
        GATHER=top_k is not None,
        SCATTER=scatter,
        W8A8=w8a8,
        WHOLE=w8a8 and packed.scales.rows % config.block_n == 0,
        APART=scale_at == "sum" and w8a8 and config.block_n * config.block_t >= SUMS * 32 * config.num_warps,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_T=config.block_t,
        SMALLEST_T=config.smallest_t or config.block_t,
        TOGETHER=TOGETHER,
        AHEAD=not as_they_lie,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
