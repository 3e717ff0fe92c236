"""Products of packed rows and experts in NVFP4, one launch for all experts (device functions).

Codes times scales have at most six bits and are exact in fp16, products of two are exact in fp32, and so every GPU
multiplies the numbers that one with FP4 matrix units does. There the even and the odd inputs of a step are a product
each: bytes are taken apart without moving anything.

A program makes BLOCK_N outputs of up to BLOCK_M rows of one expert; a row's bits do not depend on the other rows.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl

from fanfold.kernels.common.floats import e2m1_to_fp32, e4m3_to_fp16
from fanfold.kernels.common.scales import spread
from fanfold.kernels.nvfp4.swizzle import place_of


@triton.jit
def find_tile(offsets_ptr, tile, rows, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert, first row and end of a tile; expert >= experts: there is no such tile.

    Tiles are counted through the experts, so that nobody makes a list. Offsets are held inside [0, rows].
    """
    e = tl.arange(0, EXPERTS)
    start = tl.maximum(tl.load(offsets_ptr + e, mask=e < experts, other=0), 0)
    end = tl.minimum(tl.load(offsets_ptr + e + 1, mask=e < experts, other=0), rows)
    tiles = tl.cdiv(tl.maximum(end - start, 0), BLOCK_M)
    expert = tl.sum((tl.cumsum(tiles) <= tile).to(tl.int32))
    before = tl.sum(tl.where(e < expert, tiles, 0))
    first = tl.sum(tl.where(e == expert, start, 0)) + (tile - before) * BLOCK_M
    return tl.where(expert < EXPERTS, expert, experts), first, tl.sum(tl.where(e == expert, end, 0))


@triton.jit
def numbers(codes, scales, NATIVE: tl.constexpr):
    """E2M1 codes int32 [R, B] times E4M3 bytes [R, B / 8], exactly, in fp16; a scale of NaN stays one."""
    scale = e4m3_to_fp16(scales, NATIVE).to(tl.float32)
    if not NATIVE:
        scale = tl.where((scales & 0x7F) == 0x7F, float("nan"), scale)
    return (e2m1_to_fp32(codes) * spread(scale, codes.shape[0], codes.shape[1])).to(tl.float16)


@triton.jit
def add_step(acc, a, a_scale, w, w_scale, NATIVE: tl.constexpr, BLOCK_SCALED: tl.constexpr):
    """acc [BLOCK_M, BLOCK_N] + the product of a step: bytes of codes [., BLOCK_B], bytes of scales [., BLOCK_B / 8]."""
    if BLOCK_SCALED:
        a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
        w_scale = w_scale.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(a, a_scale, "e2m1", tl.trans(w), w_scale, "e2m1", acc)
    else:
        a = a.to(tl.int32)
        w = w.to(tl.int32)
        acc = tl.dot(numbers(a & 15, a_scale, NATIVE), tl.trans(numbers(w & 15, w_scale, NATIVE)), acc)
        return tl.dot(numbers(a >> 4, a_scale, NATIVE), tl.trans(numbers(w >> 4, w_scale, NATIVE)), acc)


@triton.jit(do_not_specialize=["rows", "experts"])
def experts_product(
    a_ptr: tl.tensor, as_ptr: tl.tensor, ids_ptr: tl.tensor, y_ptr: tl.tensor, w_table: tl.tensor, ws_table: tl.tensor,
    alpha_ptr: tl.tensor, offsets_ptr: tl.tensor, T: tl.tensor, rows: tl.tensor, experts: tl.tensor, N: tl.tensor,
    half_k: tl.tensor, stride_y: tl.tensor,
    SWIZZLED: tl.constexpr, NATIVE: tl.constexpr, BLOCK_SCALED: tl.constexpr, ALIGN: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """One tile.

    Operands and constants:
        a_ptr, as_ptr: codes uint8 [T, K/2] and scales (bytes) [T, K/16] of the rows.
        ids_ptr: int32 [rows], row -> row of a, or None. y_ptr: [rows, N].
        w_table, ws_table: int64 [E], addresses of each expert's codes uint8 [N, K/2] and scales, 0 where it is not
            here; scales are [K/16, N], or SWIZZLED. ALIGN: bytes to which all addresses of codes are aligned.
        alpha_ptr: fp32 [E]. offsets_ptr: int32 [E+1].
        NATIVE: the machine converts E4M3. BLOCK_SCALED: it multiplies codes and scales as they are.
        half_k: K/2, bytes of a row; a multiple of 8.
        EXPERTS: a power of two >= E. BLOCK_B: bytes of a step.
    """
    column_tiles = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // column_tiles
    expert, first, end = find_tile(offsets_ptr, tile, rows, experts, EXPERTS, BLOCK_M)
    if expert < experts:
        address = tl.load(w_table + expert)
        if address != 0:
            w_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN)
            ws_ptr = tl.load(ws_table + expert).to(tl.pointer_type(tl.uint8))
            m = first + tl.arange(0, BLOCK_M)
            on = m < end
            source = m
            if ids_ptr is not None:
                source = tl.load(ids_ptr + m, mask=on, other=0)
            there = on & (source >= 0) & (source < T)
            n = (tl.program_id(0) % column_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
            b = tl.arange(0, BLOCK_B)
            g = tl.arange(0, BLOCK_B // 8)
            groups = half_k // 8
            a_rows = a_ptr + source.to(tl.int64)[:, None] * half_k
            as_rows = as_ptr + source.to(tl.int64)[:, None] * groups
            w_rows = w_ptr + n[:, None] * half_k
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for b0 in tl.range(0, half_k, BLOCK_B, num_stages=STAGES):
                in_k = (b0 + b < half_k)[None, :]
                group = b0 // 8 + g
                in_g = (group < groups)[None, :]
                a = tl.load(a_rows + (b0 + b)[None, :], mask=there[:, None] & in_k, other=0)
                a_scale = tl.load(as_rows + group[None, :], mask=there[:, None] & in_g, other=0)
                w = tl.load(w_rows + (b0 + b)[None, :], mask=(n < N)[:, None] & in_k, other=0)
                at = place_of(n[:, None], group[None, :], groups) if SWIZZLED else group[None, :] * N + n[:, None]
                w_scale = tl.load(ws_ptr + at, mask=(n < N)[:, None] & in_g, other=0)
                acc = add_step(acc, a, a_scale, w, w_scale, NATIVE, BLOCK_SCALED)
            y = acc * tl.load(alpha_ptr + expert)
            to = y_ptr + m.to(tl.int64)[:, None] * stride_y + n[None, :]
            tl.store(to, y.to(y_ptr.dtype.element_ty), mask=on[:, None] & (n < N)[None, :])
