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
from fanfold.kernels.nvfp4.codes import codes_by_inverse, codes_of, group_scale, group_scale_by_inverse
from fanfold.kernels.nvfp4.reference import GROUP, Ties

GROUPS_A_WARP = 64
"""Two a thread: what one loads, 64 bytes of 16-bit numbers, hides how long memory takes."""
WIDE = (256, 128, 64)
"""Groups of one row that a program takes."""
TILE = (32, 8)
"""Rows and groups of a program where scales are transposed: whole sectors of 32 scales are written at once."""


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
        global_scales: fp32 [M / rows_per_scale] or None.
        token_ids: int32 [M] or None.
        ties: see there.
        rows_per_scale: consecutive rows that share a global scale, i.e. N of stacked weights; without token_ids.
        divide: global scales are reciprocals: they multiply what they else divide.
        transposed: scales [M / rows_per_scale, K/16, rows_per_scale] instead of [M, K/16]; without token_ids.

    Returns:
        uint8 [M, K/2], and E4M3 scales.

    Raises:
        UnavailableError: x is where no kernel runs.
    """
    native = arch_of(x.device) >= NATIVE_E4M3
    rows = x.shape[0] if token_ids is None else token_ids.shape[0]
    height, groups = rows_per_scale, x.shape[1] // GROUP
    packed = torch.empty((rows, x.shape[1] // 2), dtype=torch.uint8, device=x.device)
    shape = (rows // height, groups, height) if transposed else (rows, groups)
    scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    if not packed.numel():
        return packed, scales
    words = _words(x, whole=height > 1)
    matrices, stride = rows // height, words.stride(0) * height
    if not transposed and token_ids is None and words.is_contiguous() and (height > 1 or global_scales is None):
        # What shares a global scale is one long row.
        matrices = 1 if global_scales is None else matrices
        groups, height, stride = rows * groups // matrices, 1, 0 if matrices == 1 else stride
    block_r, block_g = TILE if transposed else (1, _width(groups))
    down, across = -(-height // block_r), -(-groups // block_g)
    with torch.cuda.device_of(x):
        pack_groups[(matrices * down * across,)](
            words, global_scales, token_ids, packed, scales.view(torch.uint8), x.shape[0], height, groups, stride,
            KIND=str(x.dtype).removeprefix("torch."),
            TO_EVEN=(ties or ("zero" if global_scales is None else "even")) == "even",
            DIVIDE=divide, TRANSPOSED=transposed, NATIVE=native,
            DOWN=down, ACROSS=0 if matrices * down == 1 else across, BLOCK_R=block_r, BLOCK_G=block_g,
            num_warps=block_r * block_g // GROUPS_A_WARP,
        )  # fmt: skip
    return packed, scales


def _words(x: Tensor, whole: bool) -> Tensor:
    """Words of two numbers [T, K/2]; of a copy where rows are not whole words, or lie apart and should not."""
    dtype = torch.int64 if x.dtype == torch.float32 else torch.int32
    if x.stride(0) % 2 or x.data_ptr() % dtype.itemsize or (whole and not x.is_contiguous()):
        x = x.clone(memory_format=torch.contiguous_format)
    return x.view(dtype)


def _width(groups: int) -> int:
    """As wide as leaves at most an eighth of the programs' threads idle."""
    return next((size for size in WIDE if -groups % size * 8 <= groups), WIDE[-1])


@triton.jit
def halves(words, KIND: tl.constexpr):
    """Both numbers of each word, as bits of fp32."""
    if KIND == "bfloat16":
        return words << 16, words & -65536
    elif KIND == "float16":
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    else:
        return words.to(tl.int32), (words >> 32).to(tl.int32)


@triton.jit
def bytes_of(low, high, signs, step, TO_EVEN: tl.constexpr, BY_INVERSE: tl.constexpr):
    """Bytes of two codes with their signs; numbers as bits of fp32."""
    a = low & 0x7FFFFFFF
    b = high & 0x7FFFFFFF
    if BY_INVERSE:
        code = codes_by_inverse(a, step, TO_EVEN) + codes_by_inverse(b, step, TO_EVEN) * 16
    else:
        code = codes_of(a, step, TO_EVEN) + codes_of(b, step, TO_EVEN) * 16
    return (code + signs).to(tl.uint8)


@triton.jit
def signs_of(words, kept, KIND: tl.constexpr):
    """Sign bits of both numbers of each word, in bits 3 and 7 of its low byte; the others mean nothing.

    kept: 0 where there shall be none, else -1.
    """
    if KIND == "float32":
        return ((words >> 28).to(tl.int32) & 8 | (words >> 56).to(tl.int32) & 0x80) & kept
    else:
        bits = (words & (kept & -2147450880)).to(tl.uint32, bitcast=True)  # 0x80008000
        return tl.umulhi(bits, tl.full(bits.shape, 0x100100, tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def largest(low, high):
    """The largest size of each row, as bits of fp32."""
    return tl.max(tl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF), axis=1)


@triton.jit
def pack_tile(
    x, y, gs, to_codes, to_scales, on, KIND: tl.constexpr, TO_EVEN: tl.constexpr, DIVIDE: tl.constexpr,
    NATIVE: tl.constexpr, BY_INVERSE: tl.constexpr,
):  # fmt: skip
    """Stores codes and scales of groups; x, y: words [G, 4] of their first and second eight numbers."""
    x0, x1 = halves(x, KIND)
    y0, y1 = halves(y, KIND)
    amax = tl.maximum(largest(x0, x1), largest(y0, y1)).to(tl.float32, bitcast=True)
    if BY_INVERSE:
        code, step = group_scale_by_inverse(amax, gs, DIVIDE, NATIVE)
    else:
        code, step = group_scale(amax, tl.full(amax.shape, 1.0, tl.float32) * gs, DIVIDE, NATIVE)
    tl.store(to_scales, code, mask=on)
    kept = tl.where(step == 0.0, 0, -1)[:, None]
    first = bytes_of(x0, x1, signs_of(x, kept, KIND), step, TO_EVEN, BY_INVERSE)
    second = bytes_of(y0, y1, signs_of(y, kept, KIND), step, TO_EVEN, BY_INVERSE)
    both = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (first.shape[0], 8))
    tl.store(to_codes[:, None] + tl.arange(0, 8)[None, :], both, mask=on[:, None])


@triton.jit
def pack_groups(
    x_ptr: tl.tensor, gs_ptr: tl.tensor, ids_ptr: tl.tensor, q_ptr: tl.tensor, s_ptr: tl.tensor, T: tl.tensor,
    rows: tl.tensor, groups: tl.tensor, stride_x: tl.tensor,
    KIND: tl.constexpr, TO_EVEN: tl.constexpr, DIVIDE: tl.constexpr, TRANSPOSED: tl.constexpr, NATIVE: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
) -> None:  # fmt: skip
    """One program: a tile of BLOCK_R rows and BLOCK_G groups of one matrix [rows, groups], which has one global scale.

    Operands: words of x, of a kind of numbers, `stride_x` of them from matrix to matrix; global scales of matrices or
    None; which of T matrices of x each is, or None; codes and scales. TRANSPOSED: scales are [groups, rows].
    """
    if ACROSS == 0:
        matrix = tl.program_id(0) * 0
        first_row = matrix
        first_group = tl.program_id(0) * BLOCK_G
    else:
        matrix = tl.program_id(0) // (ACROSS * DOWN)
        first_row = tl.program_id(0) // ACROSS % DOWN * BLOCK_R
        first_group = tl.program_id(0) % ACROSS * BLOCK_G
    source = matrix.to(tl.int64)
    there = True
    if ids_ptr is not None:
        source = tl.load(ids_ptr + matrix).to(tl.int64)
        there = (source >= 0) & (source < T)
    gs = None
    if gs_ptr is not None:
        gs = tl.load(gs_ptr + matrix)
    i = tl.arange(0, BLOCK_R * BLOCK_G)
    row = i // BLOCK_G
    group = i % BLOCK_G
    on = (group < groups - first_group) & (row < rows - first_row)
    first = first_row.to(tl.int64) * groups + first_group
    place = row * groups + group
    at = x_ptr + (source * stride_x + first * 8) + place[:, None] * 8 + tl.arange(0, 4)[None, :]
    x = tl.load(at, mask=(on & there)[:, None], other=0)
    y = tl.load(at + 4, mask=(on & there)[:, None], other=0)
    before = matrix.to(tl.int64) * rows * groups
    to_codes = q_ptr + (before + first) * 8 + place * 8
    if TRANSPOSED:
        to_scales = s_ptr + (before + first_group.to(tl.int64) * rows + first_row) + group * rows + row
    else:
        # Said to lie apart, scales are stored by the threads that made them; else they meet in shared memory first.
        to_scales = s_ptr + (before + first) + tl.max_contiguous(place, 1)
    if gs_ptr is None:  # noqa: SIM114 - `or` would take the number for a constant
        pack_tile(x, y, gs, to_codes, to_scales, on, KIND, TO_EVEN, DIVIDE, NATIVE, True)
    elif (gs >= 2.3283064365386963e-10) & (gs <= 4294967296.0):  # 2^-32, 2^32
        pack_tile(x, y, gs, to_codes, to_scales, on, KIND, TO_EVEN, DIVIDE, NATIVE, True)
    else:
        pack_tile(x, y, gs, to_codes, to_scales, on, KIND, TO_EVEN, DIVIDE, NATIVE, False)
