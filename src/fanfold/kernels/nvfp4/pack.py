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
from fanfold.kernels.nvfp4.codes import (
    codes_by_inverse,
    codes_of,
    codes_of_short,
    group_scale,
    group_scale_by_inverse,
)
from fanfold.kernels.nvfp4.reference import GROUP, Ties

GROUPS_A_WARP = 32
"""One a thread: few registers, so that many warps hide how long memory takes, and nothing in turn with few rows."""
WIDE = (128, 64)
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
            words, global_scales, token_ids, packed.view(torch.int32), scales.view(torch.uint8),
            x.shape[0], height, groups, stride,
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
def sizes_of(words, KIND: tl.constexpr):
    """Sizes of both numbers of each word, as bits of fp32."""
    if KIND == "bfloat16":
        sizes = words & 0x7FFF7FFF
        return sizes << 16, sizes & -65536
    elif KIND == "float16":
        sizes = words & 0x7FFF7FFF
        low = sizes.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (sizes >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)
    else:
        return words.to(tl.int32) & 0x7FFFFFFF, (words >> 32).to(tl.int32) & 0x7FFFFFFF


@triton.jit
def signs_of(words, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Words [G, 4] of two numbers -> [G], their signs: bit 3 of each of eight half bytes, in their order.

    NATIVE: by an instruction that picks bytes, or their signs: 6 instead of 14 for 16-bit numbers.
    """
    if NATIVE and KIND != "float32":
        even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
        first, second = tl.split(picked(even, odd, "0x7351"))  # numbers 0, 2, 1, 3; and 4, 6, 5, 7
        low = picked(first, second, "0xDC98") & 0x08080808
        return low | picked(first, second, "0xFEBA") & -2139062144  # 0x80808080
    else:
        if KIND == "float32":
            signs = (words >> 28).to(tl.int32) & 8 | (words >> 56).to(tl.int32) & 0x80
        else:
            signs = (words >> 12) & 8 | (words >> 24) & 0x80
        return tl.sum(signs << (tl.arange(0, 4) * 8)[None, :], axis=1)


@triton.jit
def picked(a, b, BYTES: tl.constexpr):
    """Of the eight bytes of b and a those of these numbers; 8 more: the byte's sign in all its bits."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + BYTES + ";", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def word_of(
    low, high, signs, step, TO_EVEN: tl.constexpr, BY_INVERSE: tl.constexpr, KIND: tl.constexpr, SHORT: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Words of eight codes with their signs, [G]; sizes of numbers as bits of fp32 [G, 4].

    The bits of 2^23, and 16 times those of the other base, have a sum of 2^32: nothing of them is left.
    """
    if not BY_INVERSE:
        a = codes_of(low, step, TO_EVEN, 8388608.0)
        b = codes_of(high, step, TO_EVEN, 13631488.0)
    elif SHORT:
        a = codes_of_short(low, step, 8388608.0, NATIVE)
        b = codes_of_short(high, step, 13631488.0, NATIVE)
    else:
        a = codes_by_inverse(low, step, TO_EVEN, KIND != "float32", 8388608.0, NATIVE)
        b = codes_by_inverse(high, step, TO_EVEN, KIND != "float32", 13631488.0, NATIVE)
    return tl.sum((a + b * 16) << (tl.arange(0, 4) * 8)[None, :], axis=1) | signs


@triton.jit
def pack_tile(
    x, y, gs, to_codes, to_scales, on, KIND: tl.constexpr, TO_EVEN: tl.constexpr, DIVIDE: tl.constexpr,
    NATIVE: tl.constexpr, BY_INVERSE: tl.constexpr,
):  # fmt: skip
    """Stores codes and scales of groups; x, y: words [G, 4] of their first and second eight numbers."""
    x0, x1 = sizes_of(x, KIND)
    y0, y1 = sizes_of(y, KIND)
    amax = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(y0, y1)), axis=1).to(tl.float32, bitcast=True)
    if BY_INVERSE:
        code, step = group_scale_by_inverse(amax, gs, DIVIDE, NATIVE)
    else:
        code, step = group_scale(amax, tl.full(amax.shape, 1.0, tl.float32) * gs, DIVIDE, NATIVE)
    tl.store(to_scales, code, mask=on)
    kept = tl.where(step == 0.0, 0, -1)
    SHORT: tl.constexpr = gs is None and not TO_EVEN and KIND != "float32"
    first = word_of(x0, x1, signs_of(x, KIND, NATIVE), step, TO_EVEN, BY_INVERSE, KIND, SHORT, NATIVE)
    second = word_of(y0, y1, signs_of(y, KIND, NATIVE), step, TO_EVEN, BY_INVERSE, KIND, SHORT, NATIVE)
    tl.store(to_codes[:, None] + tl.arange(0, 2)[None, :], tl.join(first & kept, second & kept), mask=on[:, None])


@triton.jit
def pack_groups(
    x_ptr: tl.tensor, gs_ptr: tl.tensor, ids_ptr: tl.tensor, q_ptr: tl.tensor, s_ptr: tl.tensor, T: tl.tensor,
    rows: tl.tensor, groups: tl.tensor, stride_x: tl.tensor,
    KIND: tl.constexpr, TO_EVEN: tl.constexpr, DIVIDE: tl.constexpr, TRANSPOSED: tl.constexpr, NATIVE: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr,
) -> None:  # fmt: skip
    """One program: a tile of BLOCK_R rows and BLOCK_G groups of one matrix [rows, groups], which has one global scale.

    Operands: words of x, of a kind of numbers, `stride_x` of them from matrix to matrix; global scales of matrices or
    None; which of T matrices of x each is, or None; words of codes; scales. TRANSPOSED: scales are [groups, rows].
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
    to_codes = q_ptr + (before + first) * 2 + place * 2
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
