"""E2M1 codes and E4M3 scales of groups of 16 (device functions).

The rule divides: scale = e4m3(amax / 6 / gs), code = nearest(size / (scale * gs)). A division of each number takes more
instructions than memory leaves time for. The reciprocal of the divisor, rounded to nearest, and one correction give the
same quotient as far as no step leaves the range of normal numbers; a test compares them.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl

from fanfold.kernels.common.floats import fp32_to_e4m3


@triton.jit
def scale_of(code):
    """E4M3 bytes of sizes -> fp32, NaN included.

    Their exponents have a bias of 7 instead of 127.
    """
    bits = code.to(tl.int32) & 0x7F
    size = (bits << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(bits == 0x7F, float("nan"), size)


@triton.jit
def quotient(a, b, inverse):
    """a / b, rounded to nearest; inverse: 1 / b."""
    first = a * inverse
    return tl.fma(tl.fma(-first, b, a), inverse, first)


@triton.jit
def group_scale(amax, gs, DIVIDE: tl.constexpr, NATIVE: tl.constexpr):
    """E4M3 bytes and steps fp32 of groups with these largest sizes fp32, by the rule.

    As integers sizes are in the order of numbers, with NaN on top, so a largest size may be that of their bits.

    gs: global scales that go with amax: two levels; None: one. DIVIDE: they are reciprocals.
    """
    wanted = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    if gs is not None:
        wanted = wanted * gs if DIVIDE else tl.div_rn(wanted, gs)
    code = fp32_to_e4m3(wanted, NATIVE)
    if gs is None:
        code = tl.where(amax == 0.0, 0x38, code).to(tl.uint8)
    step = scale_of(code)
    if gs is not None:
        step = tl.div_rn(step, gs) if DIVIDE else step * gs
    return code, step


@triton.jit
def group_scale_by_inverse(amax, gs, DIVIDE: tl.constexpr, NATIVE: tl.constexpr):
    """`group_scale` for one gs, a number from 2^-32 to 2^32; None: one level."""
    # From 464 on a scale is 448: what is larger, infinity too, may as well be 512.
    if gs is None:
        amax = tl.minimum(amax, 3072.0, propagate_nan=tl.PropagateNan.ALL)
        wanted = quotient(amax, 6.0, 1.0 / 6.0)
    else:
        inverse = tl.div_rn(1.0, gs)
        most = 3072.0 * (inverse if DIVIDE else gs)
        amax = tl.minimum(amax, most, propagate_nan=tl.PropagateNan.ALL)
        wanted = quotient(amax, 6.0, 1.0 / 6.0)
        wanted = wanted * gs if DIVIDE else quotient(wanted, gs, inverse)
    code = fp32_to_e4m3(wanted, NATIVE)
    if gs is None:
        code = tl.where(amax == 0.0, 0x38, code).to(tl.uint8)
    step = scale_of(code)
    if gs is not None:
        step = quotient(step, gs, inverse) if DIVIDE else step * gs
    return code, step


@triton.jit
def nearest(ratio, TO_EVEN: tl.constexpr):
    """Nearest E2M1 codes of ratios fp32 from 0 to 6; ties to even, or to zero. int32, whose low 8 bits are the code.

    Codes are a concave function of numbers: the least of 2 r, r + 2 and r / 2 + 4, each rounded to an integer. An fma
    with 1.5 * 2^23 rounds once, to even; 1 - 2^-24 moves what lies halfway, and nothing else, across.
    """
    ONE: tl.constexpr = 1.0 if TO_EVEN else 1.0 - 2.0**-24
    below_2 = tl.fma(ratio, 2.0 * ONE, 12582912.0).to(tl.int32, bitcast=True)
    below_4 = tl.fma(ratio, ONE, 12582914.0).to(tl.int32, bitcast=True)
    above = tl.fma(ratio, 0.5 * ONE, 12582916.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(below_2, below_4), above)


@triton.jit
def codes_of(size, step, TO_EVEN: tl.constexpr):
    """Sizes [G, n], bits of fp32 >= 0 -> `nearest` codes of size / step by the rule; steps fp32 [G], NaN gives 0."""
    step = tl.broadcast_to(step[:, None], size.shape)
    live = (step > 0.0) & (step < float("inf"))
    ratio = tl.div_rn(size.to(tl.float32, bitcast=True), tl.where(live, step, 1.0))
    return nearest(tl.where(live, tl.where(ratio < 6.0, ratio, 6.0), 0.0), TO_EVEN)


@triton.jit
def codes_by_inverse(size, step, TO_EVEN: tl.constexpr):
    """`codes_of` for steps from 2^-48 to 2^48, 0 or NaN."""
    most = tl.where(step > 0.0, step * 6.0, 0.0).to(tl.int32, bitcast=True)
    step = tl.where(step > 0.0, step, 1.0)
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    size = tl.minimum(size, most[:, None]).to(tl.float32, bitcast=True)
    return nearest(quotient(size, step[:, None], inverse[:, None]), TO_EVEN)
