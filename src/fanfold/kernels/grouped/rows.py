"""Products of few rows, without a plan: a program a row and tile of outputs, the expert read from the row's id."""

from __future__ import annotations

from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.common.aside import check_aside
from fanfold.kernels.grouped.checks import check_without_plan
from fanfold.kernels.grouped.launch import check_activation, launch
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import Aside
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weights import ProjectionWeights


def gather_gate_up(
    x: Tensor,
    weights: ProjectionWeights,
    topk_ids: Tensor,
    config: LaunchConfig,
    activation: Activation | None = None,
    permutation: Tensor | None = None,
    w8a8: bool = False,
    aside: Aside | None = None,
) -> Tensor:
    """As `launch.grouped_gate_up` with rows as they come, bit for bit with the same config.

    Args:
        x: [T, H] in fp16, bf16 or fp32; rows may lie apart.
        weights: gate and up (or up alone), [E, P, ...].
        topk_ids: int32 or int64 [T, top_k], contiguous; an id < 0 or >= E is no expert of these weights.
        config: of `configs.config_for`; a weight tile is read once for each of its rows.
        activation, permutation, w8a8, aside: as for `launch.grouped_gate_up`.

    Returns:
        y1 [R, P*I] (gate first) or h [R, I] by row (token * top_k + slot), in x's dtype. Rows without an expert are
        not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    op = "gather_gate_up"
    check_without_plan(op, "x", x, weights, topk_ids)
    if x.shape[0] != topk_ids.shape[0]:
        raise _rows_differ(op, "x", x, topk_ids, topk_ids.shape[0])
    check_activation(op, weights, activation)
    check_aside(op, aside, x, weights.n * weights.halves, topk_ids.shape[1], activation)
    out = x.new_empty((topk_ids.numel(), weights.n * (weights.halves if activation is None else 1)))
    return launch(
        op, x, weights, topk_ids.flatten(), None, config, out, top_k=topk_ids.shape[1], activation=activation,
        permutation=permutation, w8a8=w8a8, aside=aside,
    )  # fmt: skip


def gather_down(
    h: Tensor,
    weights: ProjectionWeights,
    topk_ids: Tensor,
    config: LaunchConfig,
    row_weights: Tensor | None = None,
    permutation: Tensor | None = None,
    w8a8: bool = False,
) -> Tensor:
    """As `launch.grouped_down` with rows as they come, bit for bit with the same config.

    Args:
        h: [R, I] by row, in fp16, bf16 or fp32; rows may lie apart.
        weights: down, [E, 1, ...].
        topk_ids: int32 or int64 [T, top_k], R = T * top_k, contiguous; as for `gather_gate_up`.
        config: of `configs.config_for`.
        row_weights, permutation, w8a8: as for `launch.grouped_down`.

    Returns:
        y2 [R, H] by row, in h's dtype. Rows without an expert are not written.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    op = "gather_down"
    check_without_plan(op, "h", h, weights, topk_ids, row_weights)
    if h.shape[0] != topk_ids.numel() or weights.halves != 1:
        raise _rows_differ(op, "h", h, topk_ids, topk_ids.numel(), f" and {weights.halves} halves")
    out = h.new_empty((h.shape[0], weights.n))
    return launch(
        op, h, weights, topk_ids.flatten(), None, config, out, row_weights=row_weights, permutation=permutation,
        w8a8=w8a8,
    )  # fmt: skip


def _rows_differ(op: str, name: str, x: Tensor, topk_ids: Tensor, rows: int, halves: str = "") -> ArgumentError:
    return ArgumentError(
        f"{op}: {name}",
        found=f"{x.shape[0]} rows for topk_ids {list(topk_ids.shape)}{halves}",
        expected=f"{rows} rows" + (" and weights of one half" if halves else ""),
        next_step="Pass the ids of these tokens, and the projection that the rows belong to.",
    )
