"""torch.ops.fanfold.*: schemas, fakes, and the reference as the CPU implementation.

A packed projection crosses the boundary as the name of its format, its tensors and their names (`ProjectionWeights`).
Shapes in the comments: T tokens, k experts a token, R = T*k rows, E experts, P halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError, InferenceOnlyError
from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.activation.reference import activate
from fanfold.kernels.combine.reference import combine as reference_combine
from fanfold.kernels.grouped.reference import grouped
from fanfold.routing.reference import plan_sort as reference_plan_sort
from fanfold.spec.activation import KINDS, Activation
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights

LIBRARY = torch.library.Library("fanfold", "DEF")
# A packed projection, as the schemas and as the functions here have it.
Packed = tuple[str, Sequence[str], Sequence[Tensor], Tensor | None, int, int]
PACKED = "str format, str[] names, Tensor[] tensors, Tensor? bias, int n, int k"


def plan_sort(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, k] ids -> expert_offsets int32 [E+1], sorted_rows int32 [R], positions int32 [R]: see spec.Route."""
    route = reference_plan_sort(topk_ids, num_experts)
    return route.expert_offsets, route.sorted_rows, route.positions


def plan_sort_fake(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of plan_sort."""
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    offsets, sorted_rows, positions = (
        topk_ids.new_empty((size,), dtype=torch.int32) for size in (num_experts + 1, rows, rows)
    )
    return offsets, sorted_rows, positions


def grouped_gate_up(x: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, top_k: int, *packed: *Packed) -> Tensor:
    """[T, H] -> y1 [R, P*N] at sorted positions; the row of x is the token of the position."""
    tokens = (sorted_rows // max(top_k, 1)).long()
    return _product(x[tokens], expert_offsets, _projection(*packed))


def grouped_gate_up_fake(
    x: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, top_k: int, *packed: *Packed
) -> Tensor:
    """Shapes of grouped_gate_up."""
    _, _, tensors, _, n, _ = packed
    return x.new_empty((sorted_rows.shape[0], tensors[0].shape[1] * n))


def grouped_down(h: Tensor, expert_offsets: Tensor, *packed: *Packed) -> Tensor:
    """[R, I] at sorted positions -> y2 [R, H] at sorted positions."""
    return _product(h, expert_offsets, _projection(*packed))


def grouped_down_fake(h: Tensor, expert_offsets: Tensor, *packed: *Packed) -> Tensor:
    """Shapes of grouped_down."""
    return h.new_empty((h.shape[0], packed[4]))


def activation(y1: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    """y1 [R, 2*I] (relu2: [R, I]) -> h [R, I]: see spec.Activation."""
    return activate(y1, _activation(kind, alpha, limit))


def activation_fake(y1: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    """Shapes of activation."""
    halves = 2 if _activation(kind, alpha, limit).gated else 1
    return y1.new_empty((y1.shape[0], y1.shape[1] // halves))


def combine(y2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """y2 [R, H] by row = token*k + slot -> out [T, H], summed in slot order."""
    return reference_combine(y2, topk_ids, topk_weights, num_experts)


def combine_fake(y2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """Shapes of combine."""
    return y2.new_empty((topk_ids.shape[0], y2.shape[1]))


def _projection(
    name: str, names: Sequence[str], tensors: Sequence[Tensor], bias: Tensor | None, n: int, k: int
) -> ProjectionWeights:
    return ProjectionWeights(WeightFormat.parse(name), n, k, dict(zip(names, tensors, strict=True)), bias)


def _product(x: Tensor, expert_offsets: Tensor, projection: ProjectionWeights) -> Tensor:
    bias = projection.bias
    halves = [
        grouped(
            x,
            lambda e, p=p: dequantize_expert(projection, e, p),
            expert_offsets,
            projection.n,
            None if bias is None else bias[:, p],
        )
        for p in range(projection.halves)
    ]
    return torch.cat(halves, dim=1)


def _activation(kind: str, alpha: float, limit: float) -> Activation:
    for known in KINDS:
        if known == kind:
            return Activation(known, alpha, limit)
    raise ArgumentError(
        "kind",
        found=repr(kind),
        expected=f"one of {', '.join(KINDS)}",
        next_step="Pass the kind of a spec.Activation.",
    )


def _refuse_backward(ctx: Any, *grads: Tensor) -> Tensor:
    raise InferenceOnlyError(
        "backward through a fanfold operation",
        found="a gradient",
        expected="inference only",
        next_step="Run under torch.no_grad() or torch.inference_mode().",
    )


OPS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "plan_sort": (
        "(Tensor topk_ids, int num_experts) -> (Tensor, Tensor, Tensor)",
        plan_sort,
        plan_sort_fake,
    ),
    "grouped_gate_up": (
        f"(Tensor x, Tensor expert_offsets, Tensor sorted_rows, int top_k, {PACKED}) -> Tensor",
        grouped_gate_up,
        grouped_gate_up_fake,
    ),
    "grouped_down": (
        f"(Tensor h, Tensor expert_offsets, {PACKED}) -> Tensor",
        grouped_down,
        grouped_down_fake,
    ),
    "activation": ("(Tensor y1, str kind, float alpha, float limit) -> Tensor", activation, activation_fake),
    "combine": (
        "(Tensor y2, Tensor topk_ids, Tensor topk_weights, int num_experts) -> Tensor",
        combine,
        combine_fake,
    ),
}
for _name, (_schema, _cpu, _fake) in OPS.items():
    LIBRARY.define(_name + _schema)
    LIBRARY.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"fanfold::{_name}", _fake, lib=LIBRARY)
    if _name != "plan_sort":  # integers have no gradient
        torch.library.register_autograd(f"fanfold::{_name}", _refuse_backward, lib=LIBRARY)
