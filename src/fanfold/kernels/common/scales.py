"""Scales and zero points of a weight tile (device functions): one value for each n and each run of inputs.

A run is the inputs of a tile that certainly share a scale; a tile has one run or several. `group` int [RUNS] is the
scale group of each run, `in_group` masks runs behind K. Functions give [BLOCK_N, RUNS].
"""

import triton
import triton.language as tl

from fanfold.kernels.common.floats import e4m3_to_fp16, e8m0_to_fp32


@triton.jit
def load_scales(ptr, n, in_n, group, in_group, rows, stride_n, stride_g, KIND: tl.constexpr, NATIVE_E4M3: tl.constexpr):
    """Scales in fp32.

    Args:
        ptr: scales of one matrix; bytes where KIND says so.
        n: outputs [BLOCK_N]. in_n: n < N.
        group: [RUNS]. in_group: [RUNS].
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
def zeros_along_n(ptr, n, in_n, group, in_group, stride_n, stride_g, BITS: tl.constexpr, V1: tl.constexpr):
    """True zero points int32 from int32 words of 2, 4 or 8 bits along N (GPTQ, pack-quantized).

    V1: the file holds zero - 1, subtracted on whole words; adding 1 to every field of a word at once undoes it,
    borrows included.
    """
    PER: tl.constexpr = 32 // BITS
    at = ptr + (n // PER)[:, None] * stride_n + group[None, :] * stride_g
    words = tl.load(at, mask=in_n[:, None] & in_group[None, :], other=0)
    if V1:
        ONES: tl.constexpr = 0x55555555 if BITS == 2 else (0x11111111 if BITS == 4 else 0x01010101)
        words += ONES
    shift = (n % PER) * BITS
    return (words >> shift[:, None]) & ((1 << BITS) - 1)


@triton.jit
def zeros_along_n_of_3_bits(ptr, n, in_n, group, in_group, stride_n, stride_g, BITS: tl.constexpr, V1: tl.constexpr):
    """True zero points int32 from a stream of 3-bit fields along N; `ptr` points to bytes, strides count words.

    A field lies in one byte or spans two. V1: zero - 1 modulo 8 was stored in each field (the writer takes the
    fields of this width apart).
    """
    bit = n * 3
    first = bit // 8
    last = (bit + 2) // 8  # the same byte for most fields, so nothing is read behind the last word
    inside = in_n[:, None] & in_group[None, :]
    rows = ptr + group[None, :] * (stride_g * 4)
    low = tl.load(rows + ((first // 4) * (stride_n * 4) + first % 4)[:, None], mask=inside, other=0).to(tl.int32)
    high = tl.load(rows + ((last // 4) * (stride_n * 4) + last % 4)[:, None], mask=inside, other=0).to(tl.int32)
    stored = ((low | (high << 8)) >> (bit % 8)[:, None]) & 7
    if V1:
        stored = (stored + 1) & 7
    return stored


@triton.jit
def awq_zeros(ptr, n, in_n, group, in_group, stride_n, stride_g, BITS: tl.constexpr, V1: tl.constexpr):
    """True zero points int32 from AWQ's words: column j of eight lies in nibble 0, 4, 1, 5, 2, 6, 3, 7."""
    at = ptr + (n // 8)[:, None] * stride_n + group[None, :] * stride_g
    words = tl.load(at, mask=in_n[:, None] & in_group[None, :], other=0)
    j = n % 8
    shift = ((j >> 1) | ((j & 1) << 2)) * 4
    return (words >> shift[:, None]) & 15


@triton.jit
def spread(values, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, RUNS] -> [BLOCK_N, BLOCK_K], each value for all inputs of its run; a single run stays [BLOCK_N, 1]."""
    RUNS: tl.constexpr = values.shape[1]
    if RUNS == BLOCK_K or RUNS == 1:
        return values
    else:
        wide = tl.broadcast_to(values[:, :, None], (BLOCK_N, RUNS, BLOCK_K // RUNS))
        return tl.reshape(wide, (BLOCK_N, BLOCK_K))
