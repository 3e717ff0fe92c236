"""Op: one operation of torch.ops.fanfold: schema, reference, kernels and fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fanfold.errors import InferenceOnlyError
from fanfold.ops.failures import naming_failures

LIBRARY = torch.library.Library("fanfold", "DEF")


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        schema: arguments and results, as torch.library has them.
        cpu: the reference.
        cuda: the kernels; imports Triton when it is called.
        fake: shapes and dtypes of the results.
        floats: the first result is a floating-point number, whose backward is refused.
    """

    schema: str
    cpu: Callable[..., Any]
    cuda: Callable[..., Any]
    fake: Callable[..., Any]
    floats: bool = True


def register(name: str, op: Op) -> None:
    """Makes torch.ops.fanfold.<name>."""
    LIBRARY.define(name + op.schema)
    LIBRARY.impl(name, op.cpu, "CPU")
    LIBRARY.impl(name, naming_failures(f"torch.ops.fanfold.{name}", op.cuda), "CUDA")
    torch.library.register_fake(f"fanfold::{name}", op.fake, lib=LIBRARY)
    if op.floats:
        torch.library.register_autograd(f"fanfold::{name}", _refuse_backward, lib=LIBRARY)


def in_place(*arguments: object) -> None:
    """The fake of an operation that changes an argument and returns nothing."""


def refuse_gradients(what: str, *tensors: Tensor) -> None:
    """For an operation that changes an argument in place.

    Raises:
        InferenceOnlyError: a gradient would pass through it.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InferenceOnlyError(
            what,
            found="a tensor that requires a gradient",
            expected="inference only",
            next_step="Run under torch.no_grad() or torch.inference_mode().",
        )


def _refuse_backward(ctx: Any, *grads: Tensor) -> Tensor:
    raise InferenceOnlyError(
        "backward through a fanfold operation",
        found="a gradient",
        expected="inference only",
        next_step="Run under torch.no_grad() or torch.inference_mode().",
    )
