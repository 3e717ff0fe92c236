"""Scales of E2M1 codes as the kernel reads them: a byte each that one shift makes bf16 of scale * 2^118.

NVFP4: 5 bits of exponent and 3 of mantissa without a sign, value (1 + mantissa/8) * 2^(exponent - 21), so that E4M3's
subnormal numbers need no care: bits << 4 | 0x7000 is the bf16 number. There is no zero: codes under a scale of zero are
set to zero instead. MXFP4: the exponent plus 118; bits << 7 is the bf16 number.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_E4M3 = 0x7E
"""Without a sign; 0x7F is NaN."""
LARGEST_E8M0 = 136
"""2^9, of which bf16 still holds 2^118 times as much."""
E8M0_BIAS = 118


def from_e4m3(stored: Tensor) -> Tensor:
    """E4M3 bytes uint8 of 0 to 0x7E -> bytes as the kernel reads them; zero gives any."""
    mantissa, exponent = stored & 7, stored >> 3
    # Subnormal numbers are mantissa * 2^-9: 1 is 1.0 * 2^-9, 2 and 3 are 1.m * 2^-8, 4 to 7 are 1.m * 2^-7.
    top = (mantissa >= 2).to(torch.uint8) + (mantissa >= 4).to(torch.uint8)
    subnormal = ((12 + top) << 3) | ((mantissa << (3 - top)) & 7)
    return torch.where(exponent == 0, subnormal, ((exponent + 14) << 3) | mantissa)


def from_e8m0(stored: Tensor) -> Tensor:
    """E8M0 bytes uint8 of 0 to 136 -> bytes as the kernel reads them."""
    return stored + E8M0_BIAS
