"""Launches of the grouped product: arguments checked, operands laid out, one launch a projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.common.device import NATIVE_E4M3, arch_of
from fanfold.kernels.common.layouts import layout
from fanfold.kernels.grouped.checks import check_arguments, check_scale_on_sum
from fanfold.kernels.grouped.product import grouped_product
from fanfold.spec.activation import Activation
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weights import ProjectionWeights
from fanfold.spec.work import WorkList

TOGETHER = 8
"""Work items that pass one weight tile one after the other, while it is in the L2 cache."""


def grouped_gate_up(
    x: Tensor,
    weights: ProjectionWeights,
    work: WorkList,
    sorted_rows: Tensor,
    top_k: int,
    config: LaunchConfig,
    activation: Activation | None = None,
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
    if activation is not None and activation.gated != (weights.halves == 2):
        raise ArgumentError(
            f"{op}: activation",
            found=f"{activation.kind} with {weights.halves} halves",
            expected="a gated activation for gate and up, relu2 for up alone",
            next_step="Pass the activation of the layer that these weights belong to.",
        )
    out = x.new_empty((rows, weights.n * (weights.halves if activation is None else 1)))
    arguments = launch_arguments(
        op, x, weights, work, sorted_rows, config, out, arch_of(x.device), top_k=top_k, activation=activation
    )
    return _launch(weights, work, config, arguments, out, 1 if activation is not None else weights.halves)


def grouped_down(
    h: Tensor,
    weights: ProjectionWeights,
    work: WorkList,
    sorted_rows: Tensor,
    config: LaunchConfig,
    scatter: bool = False,
) -> Tensor:
    """y2 = act(h . W2[e]^T + bias) of all rows.

    Args:
        h: [R, I] at sorted positions, in fp16, bf16 or fp32; rows may lie apart.
        weights: down, [E, 1, ...].
        work: tiles of `config.block_t` sorted positions.
        sorted_rows: int32 [R], sorted position -> row.
        config: of `configs.config_for`.
        scatter: write to rows (token * top_k + slot) instead of sorted positions.

    Returns:
        y2 [R, H] in h's dtype. Positions (or rows) that no work item holds are not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    op = "grouped_down"
    check_arguments(op, "h", h, weights, work, sorted_rows, config)
    if h.shape[0] != sorted_rows.shape[0] or weights.halves != 1:
        raise ArgumentError(
            f"{op}: h",
            found=f"{h.shape[0]} rows for {sorted_rows.shape[0]} sorted rows and {weights.halves} halves",
            expected="a row for each sorted row, and weights of one half",
            next_step="Pass the rows of this plan, in sorted order, and the down projection.",
        )
    out = h.new_empty((h.shape[0], weights.n))
    arguments = launch_arguments(op, h, weights, work, sorted_rows, config, out, arch_of(h.device), scatter=scatter)
    return _launch(weights, work, config, arguments, out, 1)


def launch_arguments(
    op: str,
    x: Tensor,
    weights: ProjectionWeights,
    work: WorkList,
    sorted_rows: Tensor,
    config: LaunchConfig,
    out: Tensor,
    arch: int,
    top_k: int | None = None,
    activation: Activation | None = None,
    scatter: bool = False,
) -> dict[str, Any]:
    """Arguments and launch options of `grouped_product`, by name; what the device compiles depends on nothing else.

    Args:
        op: the operation, for errors.
        x: [T, K] or [R, K].
        weights: the projection.
        work: tiles.
        sorted_rows: int32 [R].
        config: tile sizes.
        out: [R, ...].
        arch: compute capability; 0 in the interpreter.
        top_k: x's row is the token of the position; None: the position.
        activation: behind the product.
        scatter: write to rows.

    Raises:
        ArgumentError: a tensor of the weights is not what the format says, or the config does not fit its groups.
    """
    packed = layout(weights)
    run = packed.run or config.block_k
    scale_at = None
    if packed.scale_kind is not None:
        scale_at = "end" if packed.run == 0 else "sum" if config.scale_on_sum else "weight"
        check_scale_on_sum(op, config, run)
    return dict(
        x_ptr=x,
        y_ptr=out,
        w=packed.codes,
        s=packed.scales,
        z=packed.zeros,
        order=packed.order,
        m_ptr=packed.matrix_scale,
        b_ptr=weights.bias,
        work_ptr=work.slots,
        rows_ptr=sorted_rows,
        slots=work.slots.shape[0],
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
        RUN=min(run, config.block_k),
        HALVES=weights.halves,
        ACTIVATION=None if activation is None else activation.kind,
        GATHER=top_k is not None,
        SCATTER=scatter,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        BLOCK_T=config.block_t,
        TOGETHER=TOGETHER,
        AHEAD=packed.codes.ptr.dtype != x.dtype,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def _launch(
    weights: ProjectionWeights,
    work: WorkList,
    config: LaunchConfig,
    arguments: dict[str, Any],
    out: Tensor,
    halves: int,
) -> Tensor:
    """One launch on the current stream; none where there is nothing to do."""
    if out.shape[0] == 0 or weights.num_experts == 0:
        return out
    grid = (work.slots.shape[0] * -(-weights.n // config.block_n) * halves,)
    with torch.cuda.device_of(out):
        grouped_product[grid](**arguments)
    return out
