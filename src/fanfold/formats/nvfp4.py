"""NVFP4: E2M1 codes, an E4M3 scale per 16 along K, one fp32 scale a matrix.

`packed` uint8 [N, K/2], `scale` e4m3 [N, K/16], `global_scale` fp32 [], `input_scale` fp32 [] where
activations are quantised too. ModelOpt stores both global scales as multipliers (amax / 2688),
compressed-tensors their reciprocals, which divide (`fmt.divisor`); they stay as the file has them.
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
    "global_scale": ("weight_global_scale", "weight_scale_2"),
    "input_scale": ("input_global_scale", "input_scale"),
}
GROUP = 16
LARGEST_SCALE = 448.0  # of E4M3
LARGEST_VALUE = 6.0 * LARGEST_SCALE  # code * scale, before the global scale


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be.

    Raises:
        UnsupportedError: K is no multiple of 16, or the format has other groups.
    """
    if (fmt.bits, fmt.group_size) != (4, GROUP):
        raise UnsupportedError(
            "nvfp4 format",
            found=f"{fmt.bits} bits, group_size {fmt.group_size}",
            expected=f"4 bits, group_size {GROUP}",
            next_step="NVFP4 has one form; correct the quantization config.",
        )
    require_multiple(fmt, "N", n, 1)
    require_multiple(fmt, "K", k, GROUP)
    return {
        "packed": Field((n, k // 2), (torch.uint8,)),
        "scale": Field((n, k // GROUP), (torch.float8_e4m3fn,)),
        "global_scale": Field((), (torch.float32,), squeezable=True),
        "input_scale": Field((), (torch.float32,), required=False, squeezable=True),
    }


def unpack(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """E2M1 codes uint8 [N, K] in [0, 16)."""
    return e2m1.unpack_nibbles(tensors["packed"])


def pack(fmt: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """`packed` of E2M1 codes uint8 [N, K]; inverse of `unpack`."""
    return {"packed": e2m1.pack_nibbles(codes)}


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W fp32 [N, K] = (code * scale) * global, or (code * scale) / global for a divisor, in fp32.

    code * scale is exact, so there is one rounding a weight.
    """
    values = e2m1.decode(unpack(fmt, tensors, n, k)) * _spread(tensors["scale"].float())
    scale = tensors["global_scale"].reshape(())
    return values / scale if fmt.divisor else values * scale


def quantize(fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """W fp32 [N, K] with the two-level rules: global from amax, E4M3 scales a group, codes to nearest even.

    Raises:
        UnsupportedError: K is no multiple of 16.
    """
    shapes(fmt, *weight.shape)
    amax = weight.abs().max()
    global_scale = LARGEST_VALUE / amax if fmt.divisor else amax / amax.new_full((), LARGEST_VALUE)
    if not (torch.isfinite(global_scale) and global_scale > 0):  # all zeros, or too small for fp32
        global_scale = torch.ones_like(amax)
    largest = amax.new_full((), 6.0)  # CUDA multiplies by the reciprocal of a plain number
    group_max = weight.abs().reshape(len(weight), -1, GROUP).amax(-1) / largest
    wanted = group_max * global_scale if fmt.divisor else group_max / global_scale
    scale = wanted.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn)
    step = scale.float() / global_scale if fmt.divisor else scale.float() * global_scale
    step = _spread(step)
    codes = torch.where(step == 0, 0, e2m1.encode(weight / step))
    return {**pack(fmt, codes), "scale": scale, "global_scale": global_scale}


def _spread(scale: Tensor) -> Tensor:
    return scale.repeat_interleave(GROUP, dim=-1)
