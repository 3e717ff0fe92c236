"""Codes of a weight tile W[n0 : n0 + BLOCK_N, k0 : k0 + BLOCK_K], one function a layout (device functions).

All take the same arguments, so that a kernel is given one of them as a constant:

    ptr: the codes of one matrix (bytes for 3-bit integers and all floats of 8 bits or fewer).
    n0, k0: first output and input of the tile. N, K: sizes; what lies behind them reads as code 0.
    stride_n, stride_k: elements from one n (k) to the next; for packed axes, from one word to the next.
    BITS: bits a code.

Integer layouts give unsigned int32 codes; float layouts give the numbers.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl

from fanfold.kernels.common.floats import e2m1_to_fp32, e4m3_to_fp16
from fanfold.kernels.common.words import awq_fields, fields


@triton.jit
def dense(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, k0: tl.tensor, K: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor,
    BITS: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Numbers as they are: any strides."""
    n = n0 + tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    return tl.load(ptr + n[:, None] * stride_n + k[None, :] * stride_k, mask=inside, other=0.0)


@triton.jit
def words_along_k(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, k0: tl.tensor, K: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor,
    BITS: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """int32 words of 2-, 4- or 8-bit codes along K, low bits first (GPTQ, pack-quantized)."""
    PER: tl.constexpr = 32 // BITS
    n = n0 + tl.arange(0, BLOCK_N)
    word = k0 // PER + tl.arange(0, BLOCK_K // PER)
    inside = (n < N)[:, None] & (word * PER < K)[None, :]
    words = tl.load(ptr + n[:, None] * stride_n + word[None, :] * stride_k, mask=inside, other=0)
    return fields(words, 0, 1, PER, BITS)


@triton.jit
def bytes_along_k_of_3_bits(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, k0: tl.tensor, K: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor,
    BITS: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """3-bit codes along K: eight of them are three bytes of the stream of words, so none is split.

    `ptr` points to bytes, strides count words; byte b of a row is byte b % 4 of word b // 4.
    """
    n = n0 + tl.arange(0, BLOCK_N)
    chunk = k0 // 8 + tl.arange(0, BLOCK_K // 8)
    rows = ptr + n[:, None] * (stride_n * 4)
    bits = tl.zeros((BLOCK_N, BLOCK_K // 8), tl.int32)
    for i in tl.static_range(3):
        byte = chunk * 3 + i
        inside = (n < N)[:, None] & (byte * 8 < 3 * K)[None, :]
        at = (byte // 4) * (stride_k * 4) + byte % 4
        bits |= tl.load(rows + at[None, :], mask=inside, other=0).to(tl.int32) << (8 * i)
    return fields(bits, 0, 1, 8, 3)


@triton.jit
def awq_words(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, k0: tl.tensor, K: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor,
    BITS: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """int32 words of eight 4-bit codes along N; column j of a word lies in nibble 0, 4, 1, 5, 2, 6, 3, 7."""
    word = n0 // 8 + tl.arange(0, BLOCK_N // 8)
    k = k0 + tl.arange(0, BLOCK_K)
    inside = (word * 8 < N)[:, None] & (k < K)[None, :]
    words = tl.load(ptr + word[:, None] * stride_n + k[None, :] * stride_k, mask=inside, other=0)
    return tl.trans(awq_fields(tl.trans(words)))


@triton.jit
def e2m1_words(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, k0: tl.tensor, K: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor,
    BITS: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """E2M1 codes along K, low bits first, read as int32 words (NVFP4, MXFP4) -> fp32."""
    codes = words_along_k(ptr, n0, N, k0, K, stride_n, stride_k, BITS, NATIVE_E4M3, BLOCK_N, BLOCK_K)
    return e2m1_to_fp32(codes)


@triton.jit
def e4m3_bytes(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, k0: tl.tensor, K: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor,
    BITS: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """E4M3 numbers, given as bytes -> fp16, exact."""
    n = n0 + tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    code = tl.load(ptr + n[:, None] * stride_n + k[None, :] * stride_k, mask=inside, other=0)
    return e4m3_to_fp16(code, NATIVE_E4M3)


@triton.jit
def e4m3_operands(
    ptr: tl.tensor, n0: tl.tensor, N: tl.tensor, k0: tl.tensor, K: tl.tensor, stride_n: tl.tensor, stride_k: tl.tensor,
    BITS: tl.constexpr, NATIVE_E4M3: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """E4M3 numbers, given as bytes, for a product with E4M3 numbers: as they are; in fp16 where no machine has it."""
    if NATIVE_E4M3:
        # Numbers that are not loaded as such would pass through registers on their way to the matrix unit.
        ptr = ptr.to(tl.pointer_type(tl.float8e4nv))
    n = n0 + tl.arange(0, BLOCK_N)
    k = k0 + tl.arange(0, BLOCK_K)
    inside = (n < N)[:, None] & (k < K)[None, :]
    numbers = tl.load(ptr + n[:, None] * stride_n + k[None, :] * stride_k, mask=inside, other=0.0)
    return numbers if NATIVE_E4M3 else e4m3_to_fp16(numbers, False)
