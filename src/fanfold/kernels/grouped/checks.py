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
    row_weights: Tensor | None = None,
) -> None:
    """Whether the arguments of a product with a plan go together.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    if sorted_rows.dim() != 1 or sorted_rows.dtype != torch.int32 or not sorted_rows.is_contiguous():
        raise _wrong(op, "sorted_rows", _describe(sorted_rows), "contiguous int32 [R]")
    if work.tile != config.block_t:
        raise _wrong(op, "work", f"tiles of {work.tile} rows", f"{config.block_t}, the block_t of the config")
    slots = [sorted_rows.shape[0] // work.tile + weights.num_experts, 4]
    if list(work.slots.shape) != slots or work.slots.dtype != torch.int32 or not work.slots.is_contiguous():
        raise _wrong(op, "work.slots", _describe(work.slots), f"contiguous int32 {slots}")
    others = {"work.slots": work.slots, "sorted_rows": sorted_rows}
    _check_operands(op, x_name, x, weights, others, row_weights, sorted_rows.shape[0])


def check_without_plan(
    op: str,
    x_name: str,
    x: Tensor,
    weights: ProjectionWeights,
    topk_ids: Tensor,
    row_weights: Tensor | None = None,
) -> None:
    """Whether the arguments of a product without a plan go together.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64) or not topk_ids.is_contiguous():
        raise _wrong(op, "topk_ids", _describe(topk_ids), "contiguous int32 or int64 [T, top_k]")
    _check_operands(op, x_name, x, weights, {"topk_ids": topk_ids}, row_weights, topk_ids.numel())


def _check_operands(
    op: str,
    x_name: str,
    x: Tensor,
    weights: ProjectionWeights,
    others: dict[str, Tensor],
    row_weights: Tensor | None,
    rows: int,
) -> None:
    """x, weights, bias and row weights; that all, with `others`, are where x is."""
    if x.dim() != 2 or x.shape[1] != weights.k or x.dtype not in DTYPES:
        raise _wrong(op, x_name, _describe(x), f"float16, bfloat16 or float32 [rows, {weights.k}]")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise _wrong(op, x_name, f"strides {x.stride()}", "the values of one row one behind the other")
    shape = [weights.num_experts, weights.halves, weights.n]
    bias = weights.bias
    if bias is not None and (list(bias.shape) != shape or not bias.is_floating_point() or not bias.is_contiguous()):
        raise _wrong(op, "weights.bias", _describe(bias), f"contiguous floating-point numbers {shape}")
    if row_weights is not None and (
        list(row_weights.shape) != [rows] or row_weights.dtype != torch.float32 or not row_weights.is_contiguous()
    ):
        raise _wrong(op, "row_weights", _describe(row_weights), f"contiguous float32 [{rows}]")
    if weights.n * weights.k > LARGEST:
        raise _wrong(op, "weights", f"{weights.n} x {weights.k} elements a matrix", f"at most {LARGEST}")
    named = {**others, "weights.bias": bias, "row_weights": row_weights}
    named |= {f"weights.{name}": tensor for name, tensor in weights.tensors.items()}
    for name, tensor in named.items():
        if tensor is not None and tensor.device != x.device:
            raise _wrong(op, name, str(tensor.device), f"{x.device}, where {x_name} is")


def check_scale_on_sum(op: str, config: LaunchConfig, run: int, w8a8: bool = False) -> None:
    """Whether a step lies in one scale group, where scales multiply the sum of a step.

    Args:
        op: the operation.
        config: of the launch.
        run: consecutive inputs that certainly share a group.
        w8a8: activations have scales as well, which can multiply sums alone.

    Raises:
        ArgumentError: a step may span two groups; or w8a8 has scales of groups and the config does not sum them apart.
    """
    if config.scale_on_sum and run % config.block_k:
        raise _wrong(
            op, "config", f"scale_on_sum with block_k {config.block_k}", f"a block_k that divides runs of {run} inputs"
        )
    if w8a8 and not config.scale_on_sum:
        raise _wrong(op, "config", "scales on the weights", "scale_on_sum, for activations in 8 bits")


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
