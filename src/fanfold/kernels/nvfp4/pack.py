"""Rows of numbers as NVFP4: E2M1 codes, and an E4M3 scale per 16 (a launch; bits of `reference.pack_rows`)."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.common.device import NATIVE_E4M3, arch_of
from fanfold.kernels.common.floats import e4m3_to_fp16, fp32_to_e4m3
from fanfold.kernels.nvfp4.reference import GROUP, Ties

GROUPS = 256
"""Groups of a program, one row's behind those of the row before."""


def pack_rows(
    x: Tensor,
    global_scales: Tensor | None = None,
    token_ids: Tensor | None = None,
    ties: Ties | None = None,
    *,
    rows_per_scale: int = 1,
    divide: bool = False,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """As `reference.pack_rows`, in one launch, and for weights.

    Args:
        x: [T, K]; rows may lie apart.
        global_scales: fp32 [ceil(M / rows_per_scale)] or None.
        token_ids: int32 [M] or None.
        ties: see there.
        rows_per_scale: consecutive rows that share a global scale, i.e. N of stacked weights.
        divide: global scales are reciprocals: they multiply what they else divide.
        transposed: scales [M / rows_per_scale, K/16, rows_per_scale] instead of [M, K/16].

    Returns:
        uint8 [M, K/2], and E4M3 scales.

    Raises:
        UnavailableError: x is where no kernel runs.
    """
    native = arch_of(x.device) >= NATIVE_E4M3
    rows = x.shape[0] if token_ids is None else token_ids.shape[0]
    groups = x.shape[1] // GROUP
    packed = torch.empty((rows, x.shape[1] // 2), dtype=torch.uint8, device=x.device)
    shape = (rows // rows_per_scale, groups, rows_per_scale) if transposed else (rows, groups)
    scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    if packed.numel():
        with torch.cuda.device_of(x):
            pack_groups[(-(-rows * groups // GROUPS),)](
                x, global_scales, token_ids, packed, scales.view(torch.uint8), x.shape[0], rows, groups,
                rows_per_scale, x.stride(0),
                TO_EVEN=(ties or ("zero" if global_scales is None else "even")) == "even",
                DIVIDE=divide, TRANSPOSED=transposed, NATIVE=native, GROUPS=GROUPS, num_warps=4,
            )  # fmt: skip
    return packed, scales


@triton.jit
def encode(size, TO_EVEN: tl.constexpr):
    """Sizes fp32 >= 0 -> nearest E2M1 codes int32 in [0, 8); ties to even, or to zero."""
    code = (size > 0.25).to(tl.int32) + (size > 1.25) + (size > 2.5) + (size > 5.0)
    if TO_EVEN:
        return code + (size >= 0.75) + (size >= 1.75) + (size >= 3.5)
    else:
        return code + (size > 0.75) + (size > 1.75) + (size > 3.5)


@triton.jit
def group_codes(x, gs, TO_EVEN: tl.constexpr, DIVIDE: tl.constexpr, NATIVE: tl.constexpr):
    """Values fp32 [GROUPS, 16] -> E4M3 bytes [GROUPS], E2M1 codes int32 [GROUPS, 16] with their signs.

    gs: fp32 [GROUPS], global scales: two levels; None: one. DIVIDE: they are reciprocals.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # As integers sizes are in the order of numbers, with NaN on top.
    amax = tl.max(size, axis=1).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    if gs is not None:
        wanted = wanted * gs if DIVIDE else tl.div_rn(wanted, gs)
    code = fp32_to_e4m3(wanted, NATIVE)
    if gs is None:
        code = tl.where(amax == 0.0, 0x38, code).to(tl.uint8)
    step = scale_of(code)
    if gs is not None:
        step = tl.div_rn(step, gs) if DIVIDE else step * gs
    steps = tl.broadcast_to(step[:, None], x.shape)
    codes = encode(tl.div_rn(size.to(tl.float32, bitcast=True), steps), TO_EVEN) | ((bits >> 28) & 8)
    return code, tl.where(steps == 0.0, 0, codes)


@triton.jit
def scale_of(code):
    """E4M3 bytes of sizes -> fp32, NaN included."""
    return tl.where(code == 0x7F, float("nan"), e4m3_to_fp16(code, False).to(tl.float32))


@triton.jit
def pack_groups(
    x_ptr: tl.tensor, gs_ptr: tl.tensor, ids_ptr: tl.tensor, q_ptr: tl.tensor, s_ptr: tl.tensor, T: tl.tensor,
    rows: tl.tensor, groups: tl.tensor, rows_per_scale: tl.tensor, stride_x: tl.tensor,
    TO_EVEN: tl.constexpr, DIVIDE: tl.constexpr, TRANSPOSED: tl.constexpr, NATIVE: tl.constexpr, GROUPS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: GROUPS groups of 16. The arguments are those of `pack_rows`; T rows of x, `groups` in a row."""
    i = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    row = i // groups
    group = i % groups
    on = row < rows
    source = row
    if ids_ptr is not None:
        source = tl.load(ids_ptr + row, mask=on, other=0)
    there = on & (source >= 0) & (source < T)
    at = x_ptr + source.to(tl.int64) * stride_x + group * 16
    x = tl.load(at[:, None] + tl.arange(0, 16)[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    gs = None
    if gs_ptr is not None:
        gs = tl.load(gs_ptr + row // rows_per_scale, mask=on, other=1.0)
    code, codes = group_codes(x, gs, TO_EVEN, DIVIDE, NATIVE)
    low, high = tl.split(tl.reshape(codes, (GROUPS, 8, 2)))
    to = q_ptr + i.to(tl.int64)[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(to, (low | (high << 4)).to(tl.uint8), mask=on[:, None])
    if TRANSPOSED:
        first = (row // rows_per_scale).to(tl.int64) * groups * rows_per_scale
        tl.store(s_ptr + first + group * rows_per_scale + row % rows_per_scale, code, mask=on)
    else:
        tl.store(s_ptr + i, code, mask=on)
