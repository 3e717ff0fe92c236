"""FP8: E4M3 weights with one scale a matrix, a row, or a block.

`weight` e4m3 [N, K]; `scale` [] | [N, 1] | [ceil(N/b0), ceil(K/b1)], a multiplier under every name
(`weight_scale_inv` too); `input_scale` fp32 [] where the file has one. The last blocks may be partial.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from fanfold.errors import UnsupportedError
from fanfold.formats.fields import SCALE_DTYPES, Field, require_multiple
from fanfold.spec.weight_format import WeightFormat

FIELDS: Mapping[str, tuple[str, ...]] = {
    "weight": ("weight",),
    "scale": ("weight_scale_inv", "weight_scale"),
    "input_scale": ("input_scale", "activation_scale"),
}
LARGEST = 448.0  # of E4M3


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be.

    Raises:
        UnsupportedError: N or K is not positive, or the format has no valid block.
    """
    require_multiple(fmt, "N", n, 1)
    require_multiple(fmt, "K", k, 1)
    rows, columns = _block(fmt, n, k)
    scale_shape = () if fmt.block == (-1, -1) else (-(-n // rows), -(-k // columns))
    return {
        "weight": Field((n, k), (torch.float8_e4m3fn,)),
        "scale": Field(scale_shape, SCALE_DTYPES, squeezable=True),
        "input_scale": Field((), (torch.float32,), required=False, squeezable=True),
    }


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W fp32 [N, K] = weight * scale, in fp32."""
    return tensors["weight"].float() * _spread(fmt, tensors["scale"].float(), n, k)


def quantize(
    fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None, scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """W fp32 [N, K]: scale = amax / 448 a block (1 where it is 0), weights to nearest even against it as stored.

    `scale_dtype` is one of SCALE_DTYPES.

    Raises:
        UnsupportedError: the format has no valid block.
    """
    n, k = weight.shape
    scale_shape = shapes(fmt, n, k)["scale"].shape
    rows, columns = _block(fmt, n, k)
    padded = zero_pad(weight.abs(), (0, -k % columns, 0, -n % rows))
    amax = padded.reshape(-(-n // rows), rows, -(-k // columns), columns).amax((1, 3))
    scale = (amax / amax.new_full((), LARGEST)).to(scale_dtype)  # CUDA multiplies by the reciprocal of a plain number
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (weight / _spread(fmt, scale.float(), n, k)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": scale.reshape(scale_shape)}


def _block(fmt: WeightFormat, n: int, k: int) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    if fmt.block is None or any(size == 0 or size < -1 for size in fmt.block):
        raise UnsupportedError(
            "fp8 block",
            found=str(fmt.block),
            expected="(rows, columns), each positive or -1 for the whole axis",
            next_step="Correct weight_block_size in the checkpoint's quantization config.",
        )
    return n if fmt.block[0] == -1 else fmt.block[0], k if fmt.block[1] == -1 else fmt.block[1]


def _spread(fmt: WeightFormat, scale: Tensor, n: int, k: int) -> Tensor:
    """The scale of each weight: broadcasts against [N, K]."""
    rows, columns = _block(fmt, n, k)
    scale = scale.reshape(-(-n // rows), -(-k // columns))
    if scale.shape[0] > 1:
        scale = scale.repeat_interleave(rows, dim=0)[:n]
    return scale if scale.shape[1] == 1 else scale.repeat_interleave(columns, dim=1)[:, :k]
