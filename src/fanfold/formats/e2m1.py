"""E2M1, the 4-bit float of NVFP4 and MXFP4: sign, two exponent bits, one mantissa bit; two codes a byte."""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-m for m in MAGNITUDES))


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [N, K/2] -> codes uint8 [N, K]; the low nibble is the even k."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes uint8 [N, K] in [0, 16) -> uint8 [N, K/2]; inverse of `unpack_nibbles`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode(codes: Tensor) -> Tensor:
    """Codes uint8 in [0, 16) -> fp32 of the same shape, exact; code 8 is -0."""
    return torch.tensor(VALUES, dtype=torch.float32, device=codes.device)[codes.to(torch.int64)]


def encode(values: Tensor) -> Tensor:
    """Nearest code, ties to the even code, saturating at 6; a negative value that rounds to 0 keeps its sign.

    Args:
        values: finite fp32.

    Returns:
        uint8 of the same shape.
    """
    size = values.abs()
    # Between codes c and c + 1 lies the midpoint of their magnitudes; there the even one of the two wins.
    code = torch.zeros_like(values, dtype=torch.uint8)
    for low in range(7):
        middle = (MAGNITUDES[low] + MAGNITUDES[low + 1]) / 2
        code += size > middle if low % 2 == 0 else size >= middle
    return code | (torch.signbit(values).to(torch.uint8) << 3)
