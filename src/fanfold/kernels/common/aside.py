"""Checks of what gate_up sets aside for the fold: shapes and dtypes alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import Aside


def check_aside(
    op: str, aside: Aside | None, x: Tensor, columns: int, top_k: int, activation: Activation | None
) -> None:
    """Whether an `Aside` goes with a gate_up of x [T, K] that makes y1 [T * top_k, columns].

    Raises:
        ArgumentError: it does not.
    """
    if aside is None:
        return
    tokens = x.shape[0]
    wanted = (
        ("y1", aside.y1, x.dtype, [tokens * top_k, columns]),
        ("adapter_ids", aside.adapter_ids, torch.int32, [tokens]),
    )
    for name, tensor, dtype, shape in wanted:
        right = tensor.dtype == dtype and list(tensor.shape) == shape and tensor.is_contiguous()
        if not right or tensor.device != x.device:
            raise _wrong(op, name, f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}", dtype, shape, x.device)
    if activation is None or aside.top_k != top_k:
        raise ArgumentError(
            f"{op}: aside",
            found=f"top_k {aside.top_k}, {'no activation' if activation is None else activation.kind}",
            expected=f"top_k {top_k}, and an activation for the other rows",
            next_step="Leave aside out: without an activation all rows of y1 are made.",
        )


def _wrong(op: str, name: str, found: str, dtype: torch.dtype, shape: list[int], device: torch.device) -> ArgumentError:
    return ArgumentError(
        f"{op}: aside.{name}",
        found=found,
        expected=f"contiguous {dtype} {shape} on {device}",
        next_step="Make it for the tokens of this call.",
    )
