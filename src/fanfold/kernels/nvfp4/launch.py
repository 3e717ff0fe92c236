"""Launches of products of NVFP4 experts: tables of addresses, one launch a projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fanfold.kernels.common.device import NATIVE_E4M3, arch_of
from fanfold.kernels.nvfp4.experts import Experts
from fanfold.kernels.nvfp4.product import experts_product
from fanfold.kernels.nvfp4.run import constant
from fanfold.spec.arch import BLOCK_SCALED

BLOCK_N, BLOCK_B = 64, 64
"""Outputs of a program, bytes of a step. One config a machine, so that a row has the same bits everywhere."""
NUM_WARPS, STAGES = 4, 3


def block_m(arch: int) -> int:
    """Rows of a program; block-scaled products on sm_100 have 128."""
    return 128 if arch >= BLOCK_SCALED else 32


def product(
    packed: Tensor, scales: Tensor, rows: Tensor | None, offsets: Tensor, experts: Experts, alphas: Tensor, out: Tensor
) -> None:
    """As `reference.product`, on the current stream; nothing is read back.

    Args:
        packed: uint8 [T, K/2].
        scales: E4M3 [T, K/16].
        rows: int32 [M], row of the group order -> row of `packed`; what lies outside [0, T) reads as zeros.
        offsets: int32 [E+1]; rows outside [0, M) are left alone.
        experts: of one projection.
        alphas: fp32 [E].
        out: [M, N], written at rows of experts that are here.

    Raises:
        UnavailableError: the tensors are where no kernel runs; or a graph is being captured, and no call before had
            these experts.
    """
    arch = arch_of(out.device)
    arguments = launch_arguments(packed, scales, rows, offsets, experts, alphas, out, arch)
    tiles = out.shape[0] // block_m(arch) + len(experts.packed)
    with torch.cuda.device_of(out):
        experts_product[(tiles * -(-out.shape[1] // BLOCK_N),)](**arguments)


def launch_arguments(
    packed: Tensor,
    scales: Tensor,
    rows: Tensor | None,
    offsets: Tensor,
    experts: Experts,
    alphas: Tensor,
    out: Tensor,
    arch: int,
) -> dict[str, Any]:
    """Arguments and launch options of `experts_product`, by name; arch 0 is the interpreter."""
    codes, number = addresses(experts.packed), len(experts.packed)
    return dict(
        a_ptr=packed,
        as_ptr=scales.view(torch.uint8),
        ids_ptr=rows,
        y_ptr=out,
        w_table=constant(codes, torch.int64, out.device),
        ws_table=constant(addresses(experts.scales), torch.int64, out.device),
        alpha_ptr=alphas,
        offsets_ptr=offsets,
        T=packed.shape[0],
        rows=out.shape[0],
        experts=number,
        N=out.shape[1],
        half_k=packed.shape[1],
        stride_y=out.stride(0),
        SWIZZLED=experts.swizzled,
        NATIVE=arch >= NATIVE_E4M3,
        BLOCK_SCALED=arch >= BLOCK_SCALED,
        ALIGN=16 if all(address % 16 == 0 for address in codes) else 1,
        EXPERTS=max(2, 1 << (number - 1).bit_length()),
        BLOCK_M=block_m(arch),
        BLOCK_N=BLOCK_N,
        BLOCK_B=BLOCK_B,
        STAGES=STAGES,
        num_warps=NUM_WARPS,
    )


def addresses(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Where each expert's tensor lies; 0 for those that are not here."""
    return tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
