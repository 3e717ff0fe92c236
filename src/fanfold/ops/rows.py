"""Operations on rows where they are not fused behind a product: the activation and the weighted sum.

T tokens, k experts a token, R = T*k rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.activation import reference as reference_activation
from fanfold.kernels.combine import reference as reference_combine
from fanfold.ops.op import Op
from fanfold.spec.activation import KINDS, Activation


def activation(y1: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    """y1 [R, 2*I] (relu2: [R, I]) -> h [R, I]: see spec.Activation."""
    return reference_activation.activate(y1, activation_named(kind, alpha, limit))


def activation_cuda(y1: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    """The activation on the GPU."""
    from fanfold.kernels.activation.activate import activate

    with torch.cuda.device_of(y1):
        return activate(y1, activation_named(kind, alpha, limit))


def activation_fake(y1: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    """Shapes of activation."""
    halves = 2 if activation_named(kind, alpha, limit).gated else 1
    return y1.new_empty((y1.shape[0], y1.shape[1] // halves))


def combine(y2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """y2 [R, H] by row = token*k + slot -> out [T, H], summed in slot order."""
    return reference_combine.combine(y2, topk_ids, topk_weights, num_experts)


def combine_cuda(y2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """The weighted sum on the GPU."""
    from fanfold.kernels.combine import combine

    with torch.cuda.device_of(y2):
        return combine.combine(y2, topk_ids, topk_weights, num_experts)


def combine_fake(y2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """Shapes of combine."""
    return y2.new_empty((topk_ids.shape[0], y2.shape[1]))


def activation_named(kind: str, alpha: float, limit: float) -> Activation:
    """The activation of that kind.

    Raises:
        ArgumentError: there is none.
    """
    for known in KINDS:
        if known == kind:
            return Activation(known, alpha, limit)
    raise ArgumentError(
        "kind",
        found=repr(kind),
        expected=f"one of {', '.join(KINDS)}",
        next_step="Pass the kind of a spec.Activation.",
    )


OPS = {
    "activation": Op(
        "(Tensor y1, str kind, float alpha, float limit) -> Tensor", activation, activation_cuda, activation_fake
    ),
    "combine": Op(
        "(Tensor y2, Tensor topk_ids, Tensor topk_weights, int num_experts) -> Tensor",
        combine,
        combine_cuda,
        combine_fake,
    ),
}
