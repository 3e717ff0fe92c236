"""MXFP4: E2M1 codes and a power of two per 32 along K.

`packed` uint8 [N, K/2], `scale` uint8 [N, K/32]: E8M0, byte s means 2^(s - 127), 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fanfold.errors import UnsupportedError
from fanfold.formats import e2m1
from fanfold.formats.fields import Field, require_multiple
from fanfold.spec.weight_format import WeightFormat

FIELDS: Mapping[str, tuple[str, ...]] = {
    "packed": ("weight_packed", "weight"),
    "scale": ("weight_scale",),
}
GROUP = 32
BIAS = 127


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be.

    Raises:
        UnsupportedError: K is no multiple of 32, or the format has other groups.
    """
    if (fmt.bits, fmt.group_size) != (4, GROUP):
        raise UnsupportedError(
            "mxfp4 format",
            found=f"{fmt.bits} bits, group_size {fmt.group_size}",
            expected=f"4 bits, group_size {GROUP}",
            next_step="MXFP4 has one form; correct the quantization config.",
        )
    require_multiple(fmt, "N", n, 1)
    require_multiple(fmt, "K", k, GROUP)
    return {
        "packed": Field((n, k // 2), (torch.uint8,)),
        "scale": Field((n, k // GROUP), (torch.uint8,)),
    }


def unpack(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """E2M1 codes uint8 [N, K] in [0, 16)."""
    return e2m1.unpack_nibbles(tensors["packed"])


def pack(fmt: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """`packed` of E2M1 codes uint8 [N, K]; inverse of `unpack`."""
    return {"packed": e2m1.pack_nibbles(codes)}


def decode_scale(scale: Tensor) -> Tensor:
    """E8M0 bytes -> fp32, exact: 2^(s - 127); 0 is the subnormal 2^-127, 255 is NaN."""
    bits = scale.to(torch.int32) << 23  # the byte is the exponent field of fp32
    bits = torch.where(scale == 0, 1 << 22, bits)
    bits = torch.where(scale == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W fp32 [N, K] = code * 2^(scale - 127), exact but for values outside fp32."""
    return e2m1.decode(unpack(fmt, tensors, n, k)) * _spread(decode_scale(tensors["scale"]))


def quantize(fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """W fp32 [N, K]: exponent floor(log2 amax) - 2 a group (6 lies in [2^2, 2^3)), codes to nearest even.

    Raises:
        UnsupportedError: K is no multiple of 32.
    """
    shapes(fmt, *weight.shape)
    group_max = weight.abs().reshape(len(weight), -1, GROUP).amax(-1)
    exponent = torch.frexp(group_max).exponent - 1  # frexp's mantissa lies in [1/2, 1)
    exponent = torch.where(group_max == 0, 0, exponent - 2)
    scale = (exponent + BIAS).clamp(0, 254).to(torch.uint8)
    return {**pack(fmt, e2m1.encode(weight / _spread(decode_scale(scale)))), "scale": scale}


def _spread(scale: Tensor) -> Tensor:
    return scale.repeat_interleave(GROUP, dim=-1)
