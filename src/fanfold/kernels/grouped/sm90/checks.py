"""Checks of the arguments of the Hopper product, before any launch; shapes and dtypes alone, so nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.kernels.common.device import arch_of
from fanfold.kernels.grouped.sm90.config import Sm90Config, check_config
from fanfold.kernels.grouped.sm90.fragments import TILE, WORDS
from fanfold.kernels.grouped.sm90.items import WorkItems
from fanfold.kernels.grouped.sm90.prepare import FragmentWeights

ARCH = 90
ALIGNMENT = 16  # bytes of one copy to shared memory
LARGEST = 2**31 - 1  # of the kernel's 32-bit numbers


def check_arguments(
    op: str, x_name: str, x: Tensor, weights: FragmentWeights, work: WorkItems, config: Sm90Config, halves: int
) -> None:
    """Whether the arguments go together.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    kinds = (torch.bfloat16,) if weights.fp4_group else (torch.bfloat16, torch.float16)
    if x.dim() != 2 or x.shape[1] != weights.k or x.dtype not in kinds:
        dtypes = " or ".join(_name(kind) for kind in kinds)
        raise _wrong(op, x_name, _describe(x), f"{dtypes} [rows, {weights.k}]")
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        raise _wrong(op, x_name, f"strides {x.stride()}, address {x.data_ptr()}", "contiguous rows on 16 bytes")
    if weights.halves != halves:
        raise _wrong(op, "weights", f"{weights.halves} halves", f"{halves}")
    _check_weights(op, weights)
    check_config(op, config, weights)
    if not work.single and work.tile != config.block_t:
        raise _wrong(op, "work", f"tiles of {work.tile} rows", f"{config.block_t}, the block_t of the config")
    slots = work.total if work.single else work.total // work.tile + weights.num_experts
    _check(op, "work.items", work.items, [slots], torch.int32 if work.single else torch.int64)
    _check(op, "work.rows", work.rows, [slots] if work.single else [slots, work.tile], torch.int32)
    programs = slots * (weights.rows // config.rows) * config.parts
    if programs > LARGEST:
        raise _wrong(op, "work", f"{programs} programs", f"at most {LARGEST}")
    named = {"work.items": work.items, "work.rows": work.rows, **_tensors(weights)}
    for name, tensor in named.items():
        if tensor.device != x.device:
            raise _wrong(op, name, str(tensor.device), f"{x.device}, where {x_name} is")


def check_device(op: str, x: Tensor) -> None:
    """Whether the product runs where x is.

    Raises:
        UnavailableError: no Hopper GPU is there.
    """
    arch = arch_of(x.device)
    if arch != ARCH:
        raise UnavailableError(
            op,
            found="Triton's interpreter" if arch == 0 else f"compute capability {arch // 10}.{arch % 10}",
            expected="9.0",
            next_step="Use the portable product, fanfold.kernels.grouped.launch.",
        )


def _check_weights(op: str, weights: FragmentWeights) -> None:
    experts, slabs, tiles = weights.num_experts, weights.rows // TILE, weights.k // TILE
    _check(op, "weights.words", weights.words, [experts, slabs, tiles, WORDS], torch.int32)
    if weights.fp4_group:
        shape, dtype = [experts, slabs, tiles, TILE, TILE // weights.fp4_group], torch.uint8
    else:
        shape, dtype = [experts, slabs, weights.k // weights.format.group_size, TILE], torch.float16
    _check(op, "weights.scales", weights.scales, shape, dtype)
    wanted = {"zeros": (not weights.fp4_group and not weights.format.symmetric, weights.zeros)}
    wanted["global_scale"] = (bool(weights.fp4_group), weights.global_scale)
    for name, (needed, tensor) in wanted.items():
        if needed != (tensor is not None):
            found = "nothing" if tensor is None else _describe(tensor)
            raise _wrong(op, f"weights.{name}", found, "a tensor" if needed else "nothing, in this format")
    if weights.zeros is not None:
        _check(op, "weights.zeros", weights.zeros, shape, torch.uint8)
    if weights.global_scale is not None:
        _check(op, "weights.global_scale", weights.global_scale, [experts, weights.halves], torch.float32)


def _tensors(weights: FragmentWeights) -> dict[str, Tensor]:
    named = {"words": weights.words, "scales": weights.scales}
    named |= {} if weights.zeros is None else {"zeros": weights.zeros}
    named |= {} if weights.global_scale is None else {"global_scale": weights.global_scale}
    return {f"weights.{name}": tensor for name, tensor in named.items()}


def _check(op: str, name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if list(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise _wrong(op, name, _describe(tensor), f"contiguous {_name(dtype)} {shape}")


def _wrong(op: str, what: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"{op}: {what}",
        found=found,
        expected=expected,
        next_step="Pass weights of `prepare`, work items of their plan, and a config for both.",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return f"{_name(tensor.dtype)} {list(tensor.shape)}{strides}"
