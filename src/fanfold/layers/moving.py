"""Packed weights from one device to another: moved, never cast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.weights import ProjectionWeights


def move(tensor: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """`fn` on the bytes of a tensor, so that it can move them but not cast them."""
    plain = tensor if not tensor.is_floating_point() else tensor.contiguous().reshape(-1).view(torch.uint8)
    moved = fn(plain)
    if moved.dtype != plain.dtype:
        raise ArgumentError(
            "packed experts",
            found=f"a cast to {short_name(moved.dtype)}",
            expected="weights that stay as the quantiser wrote them",
            next_step="Load the checkpoint with another dtype to change the activations' dtype.",
        )
    return moved.view(tensor.dtype).reshape(tensor.shape)


def moved(projection: ProjectionWeights, fn: Callable[[Tensor], Tensor]) -> ProjectionWeights:
    """A projection with all its tensors behind `fn`, as `move` has it."""
    tensors = {name: move(tensor, fn) for name, tensor in projection.tensors.items()}
    return replace(projection, tensors=tensors, bias=None if projection.bias is None else move(projection.bias, fn))


def short_name(dtype: torch.dtype) -> str:
    """E.g. bfloat16."""
    return str(dtype).removeprefix("torch.")
