"""Fields of words, taken apart (device functions)."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fields(words, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Fields FIRST, FIRST + STEP, ... (COUNT, a power of two) of words [., W] -> [., W * COUNT], word after word.

    Made by joining halves, since then a thread unpacks the words that it holds.
    """
    if COUNT == 1:
        return (words >> (FIRST * BITS)) & ((1 << BITS) - 1)
    else:
        return tl.interleave(
            fields(words, FIRST, 2 * STEP, COUNT // 2, BITS), fields(words, FIRST + STEP, 2 * STEP, COUNT // 2, BITS)
        )


@triton.jit
def awq_fields(words):
    """Columns 0 to 7 of AWQ's words [., W], which lie in nibbles 0, 4, 1, 5, 2, 6, 3, 7 -> [., W * 8]."""
    return tl.interleave(fields(words, 0, 1, 4, 4), fields(words, 4, 1, 4, 4))
