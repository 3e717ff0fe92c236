"""E2M1 codes and E4M3 scales of groups of 16 (device functions).

The rule divides: scale = e4m3(amax / 6 / gs), code = nearest(size / (scale * gs)). A division of each number takes more
instructions than memory leaves time for. Products with the reciprocal of the divisor, carried further than fp32, give
the same codes and scales as far as no step leaves the range of normal numbers; a test compares them for all divisors.

Ratios come in eighths: min(max(ratio, 0), 1) is part of the instruction that makes the ratio, and turns NaN into 0.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl

from fanfold.kernels.common.floats import e4m3_to_fp16, fp32_to_e4m3


@triton.jit
def scale_of(code, NATIVE: tl.constexpr):
    """E4M3 bytes of sizes -> fp32, NaN included."""
    size = e4m3_to_fp16(code, NATIVE).to(tl.float32)
    return size if NATIVE else tl.where(code == 0x7F, float("nan"), size)


@triton.jit
def reciprocal(b, NATIVE: tl.constexpr):
    """1 / b, right to 2 ulps; NATIVE: one instruction (`/` has five more for subnormal b)."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / b


@triton.jit
def inverse_of(b, NATIVE: tl.constexpr):
    """1 / b in two parts > 0, fp32 and what that lacks; their sum is 1 / b rounded to nearest. NaN for 0.

    One Newton step, aimed an ulp too low: so the second part is never 0, and infinity times both is infinity. The
    second part takes its own error in, times 1.75 instead of 1: of the number just below a power of two it would lie
    halfway between two others.
    """
    high = reciprocal(b, NATIVE)
    high = tl.fma(tl.fma(-b, high, 1.0 - 2.0**-23), high, high)
    rest = tl.fma(-b, high, 1.0)
    return high, high * tl.fma(rest * 1.75, rest, rest)


@triton.jit
def quotient(a, b, inverse):
    """a / b, rounded to nearest; inverse: 1 / b, rounded to nearest."""
    first = a * inverse
    return tl.fma(tl.fma(-first, b, a), inverse, first)


@triton.jit
def short_quotient(a, high, low):
    """a / b, whose parts `inverse_of` b has made, for a of at most 11 bits.

    Rounded to nearest wherever an E2M1 code turns on the last bit.
    """
    return tl.fma(a, high, a * low)


@triton.jit
def group_scale(amax, gs, DIVIDE: tl.constexpr, NATIVE: tl.constexpr):
    """E4M3 bytes and steps fp32 of groups with these largest sizes fp32, by the rule.

    As integers sizes are in the order of numbers, with NaN on top, so a largest size may be that of their bits.

    gs: global scales that go with amax: two levels. DIVIDE: they are reciprocals.
    """
    wanted = tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32))
    wanted = wanted * gs if DIVIDE else tl.div_rn(wanted, gs)
    code = fp32_to_e4m3(wanted, NATIVE)
    step = scale_of(code, NATIVE)
    return code, tl.div_rn(step, gs) if DIVIDE else step * gs


@triton.jit
def group_scale_by_inverse(amax, gs, DIVIDE: tl.constexpr, NATIVE: tl.constexpr):
    """`group_scale` for one gs, a number from 2^-32 to 2^32; None: one level, where groups of zeros have a scale of 1.

    From 464 on a scale is 448: what is larger, infinity too, may as well be 512.
    """
    if gs is None:
        amax = tl.minimum(amax, 3072.0, propagate_nan=tl.PropagateNan.ALL)
        code = fp32_to_e4m3(quotient(amax, 6.0, 1.0 / 6.0), NATIVE)
        code = tl.where(amax == 0.0, 0x38, code).to(tl.uint8)
        return code, scale_of(code, NATIVE)
    else:
        high, low = inverse_of(gs, NATIVE)
        inverse = high + low
        most = 3072.0 * (inverse if DIVIDE else gs)
        amax = tl.minimum(amax, most, propagate_nan=tl.PropagateNan.ALL)
        wanted = quotient(amax, 6.0, 1.0 / 6.0)
        code = fp32_to_e4m3(wanted * gs if DIVIDE else quotient(wanted, gs, inverse), NATIVE)
        step = scale_of(code, NATIVE)
        return code, quotient(step, gs, inverse) if DIVIDE else step * gs


@triton.jit
def nearest(ratio, DOWN: tl.constexpr, BASE: tl.constexpr):
    """Nearest E2M1 codes of ratios fp32 in eighths, saturating; int32, added to the bits of BASE.

    Codes are a concave function of numbers: the least of 2 r, r + 2 and 0.3 r + 5, each rounded to an integer. An fma
    with BASE, from 2^23 to 2^24, rounds once, to even. 1 - DOWN moves what lies halfway, and nothing else, across; by
    0.3 it always does, as 5 goes to 4 by both rules.
    """
    ABOVE: tl.constexpr = 2.4 * (1.0 - (DOWN if DOWN > 0.0 else 2.0**-24))
    ratio = tl.minimum(tl.maximum(ratio, 0.0), 1.0)
    below_2 = tl.fma(ratio, 16.0 * (1.0 - DOWN), BASE).to(tl.int32, bitcast=True)
    below_4 = tl.fma(ratio, 8.0 * (1.0 - DOWN), BASE + 2.0).to(tl.int32, bitcast=True)
    above = tl.fma(ratio, ABOVE, BASE + 5.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(below_2, below_4), above)


@triton.jit
def codes_of(size, step, TO_EVEN: tl.constexpr, BASE: tl.constexpr):
    """`nearest` codes of size / step by the rule; sizes [G, n], bits of fp32 >= 0; steps fp32 [G], 0 and NaN give 0."""
    live = ((step > 0.0) & (step < float("inf")))[:, None]
    step = tl.broadcast_to(step[:, None], size.shape)
    ratio = tl.div_rn(size.to(tl.float32, bitcast=True), tl.where(live, step, 1.0))
    return nearest(tl.where(live, ratio * 0.125, 0.0), 0.0 if TO_EVEN else 2.0**-24, BASE)


@triton.jit
def codes_by_inverse(size, step, TO_EVEN: tl.constexpr, SHORT: tl.constexpr, BASE: tl.constexpr, NATIVE: tl.constexpr):
    """`codes_of` for steps from 2^-48 to 2^48, 0 or NaN. SHORT: sizes have at most 11 bits."""
    step = step * 8.0
    high, low = inverse_of(step, NATIVE)
    if SHORT:
        ratio = short_quotient(size.to(tl.float32, bitcast=True), high[:, None], low[:, None])
    else:
        size = tl.minimum(size, step.to(tl.int32, bitcast=True)[:, None]).to(tl.float32, bitcast=True)
        ratio = quotient(size, step[:, None], (high + low)[:, None])
    return nearest(ratio, 0.0 if TO_EVEN else 2.0**-24, BASE)


@triton.jit
def codes_of_short(size, step, BASE: tl.constexpr, NATIVE: tl.constexpr):
    """`codes_by_inverse`, ties to zero, of sizes of at most 11 bits by steps of four: near a tie there is nothing else.

    Steps of 0 give any codes.
    """
    ratio = size.to(tl.float32, bitcast=True) * reciprocal(step * 8.0, NATIVE)[:, None]
    return nearest(ratio, 2.0**-20, BASE)
