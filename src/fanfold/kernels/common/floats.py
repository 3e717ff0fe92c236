"""Small floats to larger ones, exactly, and fp32 to E4M3, to the nearest (device functions).

A small float with a smaller exponent bias becomes a larger one by moving its fields into place and multiplying by the
power of two between the biases. Subnormals come out right as well: they are moved onto subnormals.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e2m1_to_fp32(code):
    """E2M1 codes int32 in [0, 16) -> fp32; bias 1 against 127."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def e4m3_to_fp16(code, NATIVE: tl.constexpr):
    """E4M3 bytes (uint8) -> fp16; bias 7 against 15. NaN bytes, which loading refuses, are not told from numbers.

    NATIVE: the machine converts (sm_89 and later).
    """
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        wide = code.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def e8m0_to_fp32(code):
    """E8M0 bytes (uint8) -> fp32 2^(code - 127); code 0 is the subnormal 2^-127. Loading refuses 255 (NaN)."""
    bits = code.to(tl.int32) << 23
    return tl.where(bits == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def fp32_to_e4m3(x, NATIVE: tl.constexpr):
    """fp32 -> E4M3 bytes (uint8), to nearest even; beyond 448 it is 448, NaN stays NaN.

    NATIVE: the machine converts, one number at a time. It could take two, but ptxas 12.8 then may read the second byte
    of the pair before it is there: seen on an H200 where both bytes go on as 16-bit numbers.
    """
    if NATIVE:
        code = tl.inline_asm_elementwise(
            """
            {
            .reg .b16 pair;
            cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, $1;
            cvt.u32.u16 $0, pair;
            }""",
            "=r,r",
            [x],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return code.to(tl.uint8)
    else:
        bits = x.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # Normal numbers keep 3 bits of their fraction; the bias falls from 127 to 7.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 codes are multiples of 2^-9: the sum has such steps as its last bit.
        steps = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < (121 << 23), steps, tl.minimum(normal, 0x7E))
        code = tl.where(size > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
