"""Scales and zero points of a weight tile (device functions): one value for each n and each run of inputs.

A run is the inputs of a tile that certainly share a scale; a tile has one run or several. `group` int [RUNS] is the
scale group of each run, `in_group` masks runs behind K. Functions give [BLOCK_N, RUNS].
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl

from fanfold.kernels.common.floats import e4m3_to_fp16, e8m0_to_fp32
from fanfold.kernels.common.words import awq_fields, fields


@triton.jit
def load_scales(
    ptr: tl.tensor, n: tl.tensor, in_n: tl.tensor, group: tl.tensor, in_group: tl.tensor, rows: tl.tensor,
    stride_n: tl.tensor, stride_g: tl.tensor, KIND: tl.constexpr, NATIVE_E4M3: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scales in fp32.

    Args:
        ptr: scales of one matrix; bytes where KIND says so.
        n: outputs [BLOCK_N].
        in_n: n < N.
        group: [RUNS].
        in_group: [RUNS].
        rows: consecutive outputs that share a scale.
        stride_n: elements from one block of rows to the next.
        stride_g: elements from one group to the next.
        KIND: "float", "e4m3" or "e8m0".
        NATIVE_E4M3: the machine converts E4M3.
    """
    at = ptr + (n // rows)[:, None] * stride_n + group[None, :] * stride_g
    inside = in_n[:, None] & in_group[None, :]
    if KIND == "float":
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)
    else:
        code = tl.load(at, mask=inside, other=0)
        if KIND == "e4m3":
            return e4m3_to_fp16(code, NATIVE_E4M3).to(tl.float32)
        else:
            return e8m0_to_fp32(code)


@triton.jit
def zeros_along_n(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, group: tl.tensor, in_group: tl.tensor, stride_n: tl.tensor,
    stride_g: tl.tensor, BITS: tl.constexpr, V1: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """True zero points int32 from int32 words of 2, 4 or 8 bits along N (GPTQ, pack-quantized).

    V1: the file holds zero - 1, subtracted on whole words; adding 1 to every field of a word at once undoes it,
    borrows included.
    """
    PER: tl.constexpr = 32 // BITS
    word = n0 // PER + tl.arange(0, BLOCK_N // PER)
    at = ptr + group[:, None] * stride_g + word[None, :] * stride_n
    words = tl.load(at, mask=in_group[:, None] & (word * PER < N)[None, :], other=0)
    if V1:
        ONES: tl.constexpr = 0x55555555 if BITS == 2 else (0x11111111 if BITS == 4 else 0x01010101)
        words += ONES
    return tl.trans(fields(words, 0, 1, PER, BITS))


@triton.jit
def zeros_along_n_of_3_bits(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, group: tl.tensor, in_group: tl.tensor, stride_n: tl.tensor,
    stride_g: tl.tensor, BITS: tl.constexpr, V1: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """True zero points int32 from a stream of 3-bit fields along N; `ptr` points to bytes, strides count words.

    Eight fields are three bytes. V1: zero - 1 modulo 8 was stored in each field (the writer takes the fields of this
    width apart).
    """
    chunk = n0 // 8 + tl.arange(0, BLOCK_N // 8)
    bits = tl.zeros((group.shape[0], BLOCK_N // 8), tl.int32)
    for i in tl.static_range(3):
        byte = chunk * 3 + i
        at = ptr + group[:, None] * (stride_g * 4) + ((byte // 4) * (stride_n * 4) + byte % 4)[None, :]
        inside = in_group[:, None] & (byte * 8 < 3 * N)[None, :]
        bits |= tl.load(at, mask=inside, other=0).to(tl.int32) << (8 * i)
    stored = fields(bits, 0, 1, 8, 3)
    if V1:
        stored = (stored + 1) & 7
    return tl.trans(stored)


@triton.jit
def awq_zeros(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, group: tl.tensor, in_group: tl.tensor, stride_n: tl.tensor,
    stride_g: tl.tensor, BITS: tl.constexpr, V1: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """True zero points int32 from AWQ's words of eight along N."""
    word = n0 // 8 + tl.arange(0, BLOCK_N // 8)
    at = ptr + group[:, None] * stride_g + word[None, :] * stride_n
    words = tl.load(at, mask=in_group[:, None] & (word * 8 < N)[None, :], other=0)
    return tl.trans(awq_fields(words))


@triton.jit
def spread(values: tl.tensor, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """[BLOCK_N, RUNS] -> [BLOCK_N, BLOCK_K], each value for all inputs of its run; a single run stays [BLOCK_N, 1]."""
    RUNS: tl.constexpr = values.shape[1]
    if RUNS == BLOCK_K or RUNS == 1:
        return values
    else:
        wide = tl.broadcast_to(values[:, :, None], (BLOCK_N, RUNS, BLOCK_K // RUNS))
        return tl.reshape(wide, (BLOCK_N, BLOCK_K))
