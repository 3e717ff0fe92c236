"""Inference only: results that refuse to be differentiated."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fanfold.errors import InferenceOnlyError


def without_backward(out: Tensor, *inputs: Tensor) -> Tensor:
    """`out`, computed from `inputs` without autograd; backward through it raises instead of losing gradients.

    Raises:
        InferenceOnlyError: on backward, where one of the inputs needs a gradient.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return cast("Tensor", _NoBackward.apply(out, *inputs))
    return out


class _NoBackward(torch.autograd.Function):
    """Hands the result through; refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InferenceOnlyError(
            "backward through a layer of fanfold",
            found="a gradient",
            expected="inference only",
            next_step="Run under torch.no_grad() or torch.inference_mode().",
        )
