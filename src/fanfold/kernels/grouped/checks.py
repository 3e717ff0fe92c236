"""Checks of the arguments of the grouped product, before any launch; shapes and dtypes alone, so nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weights import ProjectionWeights
from fanfold.spec.work import WorkList

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST = 2**31 - 1
"""Elements that 32-bit offsets reach: one matrix may hold so many. Experts and rows have 64-bit offsets."""


def check_arguments(
    op: str,
    x_name: str,
    x: Tensor,
    weights: ProjectionWeights,
    work: WorkList,
    sorted_rows: Tensor,
    config: LaunchConfig,
) -> None:
    """Whether the arguments go together.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    if x.dim() != 2 or x.shape[1] != weights.k or x.dtype not in DTYPES:
        raise _wrong(op, x_name, _describe(x), f"float16, bfloat16 or float32 [rows, {weights.k}]")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise _wrong(op, x_name, f"strides {x.stride()}", "the values of one row one behind the other")
    if sorted_rows.dim() != 1 or sorted_rows.dtype != torch.int32 or not sorted_rows.is_contiguous():
        raise _wrong(op, "sorted_rows", _describe(sorted_rows), "contiguous int32 [R]")
    if work.tile != config.block_t:
        raise _wrong(op, "work", f"tiles of {work.tile} rows", f"{config.block_t}, the block_t of the config")
    slots = [sorted_rows.shape[0] // work.tile + weights.num_experts, 4]
    if list(work.slots.shape) != slots or work.slots.dtype != torch.int32 or not work.slots.is_contiguous():
        raise _wrong(op, "work.slots", _describe(work.slots), f"contiguous int32 {slots}")
    shape = [weights.num_experts, weights.halves, weights.n]
    bias = weights.bias
    if bias is not None and (list(bias.shape) != shape or not bias.is_floating_point() or not bias.is_contiguous()):
        raise _wrong(op, "weights.bias", _describe(bias), f"contiguous floating-point numbers {shape}")
    if weights.n * weights.k > LARGEST:
        raise _wrong(op, "weights", f"{weights.n} x {weights.k} elements a matrix", f"at most {LARGEST}")
    named = {"work.slots": work.slots, "sorted_rows": sorted_rows, "weights.bias": bias}
    named |= {f"weights.{name}": tensor for name, tensor in weights.tensors.items()}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != x.device:
            raise _wrong(op, name, str(tensor.device), f"{x.device}, where {x_name} is")


def check_scale_on_sum(op: str, config: LaunchConfig, run: int) -> None:
    """Whether a step lies in one scale group, where scales multiply the sum of a step.

    Raises:
        ArgumentError: it may span two.
    """
    if config.scale_on_sum and run % config.block_k:
        raise _wrong(
            op, "config", f"scale_on_sum with block_k {config.block_k}", f"a block_k that divides runs of {run} inputs"
        )


def _wrong(op: str, what: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"{op}: {what}",
        found=found,
        expected=expected,
        next_step="Pass one layer's packed weights, the plan of its rows, and a config for both.",
    )


def _describe(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)}" + ("" if tensor.is_contiguous() else f" with strides {tensor.stride()}")
