"""Activations in E4M3, each row (or each group of its inputs) with a scale of its own."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.common.device import NATIVE_E4M3, arch_of
from fanfold.kernels.common.floats import fp32_to_e4m3
from fanfold.kernels.common.operands import RowScales

LARGEST = 448.0  # of E4M3
STEP = 4096
"""Most inputs that a program holds."""


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, RowScales]:
    """x as E4M3 numbers and scales: x ~ numbers * scale.

    Args:
        x: [R, K] in fp16, bf16 or fp32; rows may lie apart.
        group_size: inputs that share a scale; the last group may be short.

    Returns:
        E4M3 bytes uint8 [R, K], and scales fp32 [R, ceil(K / group_size)].

    Raises:
        UnavailableError: x is where no kernel runs.
    """
    rows, k = x.shape
    groups = -(-k // group_size)
    codes = torch.empty((rows, k), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    native = arch_of(x.device) >= NATIVE_E4M3
    if rows:
        block = triton.next_power_of_2(group_size)
        together = max(1, min(STEP // block, triton.next_power_of_2(groups)))
        grid = (rows, -(-groups // together))
        with torch.cuda.device_of(x):
            quantize_groups[grid](
                x, codes, scales, k, groups, group_size, x.stride(0),
                NATIVE=native, GROUPS=together, BLOCK=block, num_warps=8 if block > STEP else 4,
            )  # fmt: skip
    return codes, RowScales(scales, scales.stride(0), scales.stride(1), group_size)


@triton.jit
def quantize_groups(
    x_ptr: tl.tensor, q_ptr: tl.tensor, s_ptr: tl.tensor, K: tl.tensor, groups: tl.tensor, group_size: tl.tensor,
    stride_x: tl.tensor, NATIVE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: GROUPS groups of one row; scale = amax / 448, 1 where all is 0."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, BLOCK)
    k = group[:, None] * group_size + i[None, :]
    inside = (i < group_size)[None, :] & (k < K)
    x = tl.load(x_ptr + row * stride_x + k, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((GROUPS,), 448.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    numbers = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    tl.store(q_ptr + row * K + k, fp32_to_e4m3(numbers, NATIVE), mask=inside)
    tl.store(s_ptr + row * groups + group, scale, mask=group < groups)
