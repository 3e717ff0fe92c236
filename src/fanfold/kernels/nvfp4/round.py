"""Activations as the numbers that their NVFP4 packing stands for, without the global scale (a launch).

Codes times scales have at most six bits and are exact in every dtype of activations, so a product of them, with weights
as they are, has the numbers of a product of both operands in 4 bits.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.common.device import NATIVE_E4M3, arch_of
from fanfold.kernels.common.floats import e2m1_to_fp32
from fanfold.kernels.nvfp4.codes import codes_of, group_scale, scale_of
from fanfold.kernels.nvfp4.reference import GROUP

GROUPS = 256
"""Groups of a program, one row's behind those of the row before."""


def round_rows(
    x: Tensor, scales: Tensor, expert_ids: Tensor | None = None, rows: Tensor | None = None, top_k: int = 1
) -> Tensor:
    """`reference.unpack_rows` of `reference.pack_rows` with two levels of scales, in one launch.

    Args:
        x: [T, K] in fp16, bf16 or fp32, K a multiple of 16; rows may lie apart.
        scales: fp32 [E], the global scale of each expert, finite and > 0; with no ids [1], or alike.
        expert_ids: int32 or int64 [R], the expert of each row; those outside [0, E) leave their result unset. None:
            R = T and the first scale for all.
        rows: int32 [R], place in the result -> row; None: the same.
        top_k: places that share a row of x, R = T * top_k.

    Returns:
        [R, K] in x's dtype, exact: code * scale.

    Raises:
        UnavailableError: x is where no kernel runs.
    """
    native = arch_of(x.device) >= NATIVE_E4M3
    count, groups = x.shape[0] * top_k, x.shape[1] // GROUP
    rounded = x.new_empty((count, x.shape[1]))
    if rounded.numel():
        with torch.cuda.device_of(x):
            round_groups[(-(-count * groups // GROUPS),)](
                x, rounded, scales, expert_ids, rows, count, groups, scales.shape[0], top_k, x.stride(0),
                NATIVE=native, GROUPS=GROUPS, num_warps=4,
            )  # fmt: skip
    return rounded


@triton.jit(do_not_specialize=["rows", "experts", "top_k"])
def round_groups(
    x_ptr: tl.tensor, y_ptr: tl.tensor, gs_ptr: tl.tensor, ids_ptr: tl.tensor, rows_ptr: tl.tensor, rows: tl.tensor,
    groups: tl.tensor, experts: tl.tensor, top_k: tl.tensor, stride_x: tl.tensor,
    NATIVE: tl.constexpr, GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: GROUPS groups of 16. The arguments are those of `round_rows`; `groups` in a row."""
    i = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    place = i // groups
    group = i % groups
    on = place < rows
    expert = tl.zeros((GROUPS,), tl.int64)
    if ids_ptr is not None:
        row = place
        if rows_ptr is not None:
            row = tl.load(rows_ptr + place, mask=on, other=0)
        expert = tl.load(ids_ptr + row, mask=on, other=-1).to(tl.int64)
        on = on & (expert >= 0) & (expert < experts)
    gs = tl.load(gs_ptr + expert, mask=on, other=1.0)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    at = x_ptr + (place // top_k).to(tl.int64)[:, None] * stride_x + column
    x = tl.load(at, mask=on[:, None], other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code, step = group_scale(tl.max(size, axis=1).to(tl.float32, bitcast=True), gs, False, NATIVE)
    codes = codes_of(size, step, True, 8388608.0) & 7 | tl.where((step == 0.0)[:, None], 0, (bits >> 28) & 8)
    y = e2m1_to_fp32(codes) * scale_of(code, NATIVE)[:, None]
    to = y_ptr + place.to(tl.int64)[:, None] * (groups * 16) + column
    tl.store(to, y.to(y_ptr.dtype.element_ty), mask=on[:, None])
