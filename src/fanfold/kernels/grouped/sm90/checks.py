"""Checks of the arguments of the Hopper product, before any launch; shapes and dtypes alone, so nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.kernels.common.device import arch_of
from fanfold.kernels.grouped.sm90.config import Sm90Config, check_config
from fanfold.kernels.grouped.sm90.weights import FragmentWeights, describe
from fanfold.spec.work import WorkItems

ARCH = 90
DTYPES = (torch.bfloat16, torch.float16)
FP4_DTYPES = (torch.bfloat16,)
ALIGNMENT = 16  # bytes of one copy to shared memory
LARGEST = 2**31 - 1  # of the kernel's 32-bit numbers


def check_arguments(
    op: str, x_name: str, x: Tensor, weights: FragmentWeights, work: WorkItems, config: Sm90Config, gate_up: bool
) -> None:
    """Whether the arguments go together.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    kinds = FP4_DTYPES if weights.fp4_group else DTYPES
    if x.dim() != 2 or x.shape[1] != weights.k or x.dtype not in kinds:
        dtypes = " or ".join(_name(kind) for kind in kinds)
        raise _wrong(op, x_name, describe(x), f"{dtypes} [rows, {weights.k}]")
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        raise _wrong(op, x_name, f"strides {x.stride()}, address {x.data_ptr()}", "contiguous rows on 16 bytes")
    check_config(op, config, weights, gate_up)
    if not work.single and work.tile != config.block_t:
        raise _wrong(op, "work", f"tiles of {work.tile} rows", f"{config.block_t}, the block_t of the config")
    if work.num_experts != weights.num_experts:
        raise _wrong(op, "work", f"{work.num_experts} experts", f"{weights.num_experts}, those of the weights")
    if work.single:
        slots = work.total
        kind = torch.int64 if work.items.dtype == torch.int64 else torch.int32
        _check(op, "work.items", work.items, (slots,), kind)
    else:
        slots = work.total // work.tile + weights.num_experts
        _check(op, "work.items", work.items, (slots,), torch.int64)
        _check(op, "work.rows", work.rows, (slots, work.tile), torch.int32)
    programs = slots * (weights.rows // config.rows) * config.parts
    if programs > LARGEST:
        raise _wrong(op, "work", f"{programs} programs", f"at most {LARGEST}")
    for name, tensor in (("work.items", work.items), ("work.rows", work.rows), ("weights.words", weights.words)):
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


def _check(op: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise _wrong(op, name, describe(tensor), f"contiguous {_name(dtype)} {list(shape)}")


def _wrong(op: str, what: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"{op}: {what}",
        found=found,
        expected=expected,
        next_step="Pass weights of `prepare`, work items of their plan, and a config for both.",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
