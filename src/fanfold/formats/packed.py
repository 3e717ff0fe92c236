"""compressed-tensors' pack-quantized: codes packed along K, zero points along N, both as value + 2^(bits-1).

`packed` int32 [N, ceil(K*bits/32)], `scale` [N, G], `zero_point` int32 [ceil(N*bits/32), G] in asymmetric
files, `g_idx` int32 [K] in older act-ordered ones. Codes here are the stored, offset ones, so a zero point of
value 0 is 2^(bits-1), as in symmetric files of all integer formats. K and N need not fill whole words.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fanfold.formats import integers
from fanfold.formats.fields import SCALE_DTYPES, Field, require_multiple
from fanfold.formats.words import pack_words, unpack_words, words_for
from fanfold.spec.weight_format import WeightFormat

FIELDS: Mapping[str, tuple[str, ...]] = {
    "packed": ("weight_packed",),
    "scale": ("weight_scale",),
    "zero_point": ("weight_zero_point",),
    "g_idx": ("weight_g_idx",),
}


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be.

    Symmetric files may lack `zero_point`, files without act-order may lack `g_idx`.

    Raises:
        UnsupportedError: N or K is not positive.
    """
    require_multiple(fmt, "N", n, 1)
    require_multiple(fmt, "K", k, 1)
    groups = fmt.groups(k)
    return {
        "packed": Field((n, words_for(k, fmt.bits)), (torch.int32,)),
        "scale": Field((n, groups), SCALE_DTYPES, squeezable=True),
        "zero_point": Field((words_for(n, fmt.bits), groups), (torch.int32,), required=not fmt.symmetric),
        "g_idx": Field((k,), (torch.int32,), required=fmt.act_order),
    }


def unpack(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """Codes uint8 [N, K]."""
    return unpack_words(tensors["packed"], fmt.bits, k)


def pack(fmt: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """`packed` of codes uint8 [N, K]; inverse of `unpack`.

    Raises:
        ArgumentError: a code is out of range.
    """
    return {"packed": pack_words(codes, fmt.bits)}


def unpack_zeros(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """True zero points int32 [G, N]; symmetric formats have 2^(bits-1) whatever `zero_point` holds."""
    if fmt.symmetric:
        return integers.symmetric_zeros(fmt, n, k, tensors["scale"].device)
    return unpack_words(tensors["zero_point"].T, fmt.bits, n).to(torch.int32)


def pack_zeros(fmt: WeightFormat, zeros: Tensor) -> Tensor:
    """`zero_point` of true zero points [G, N] in [0, 2^bits).

    Raises:
        ArgumentError: a zero point is out of range.
    """
    return pack_words(zeros, fmt.bits).T.contiguous()


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W fp32 [N, K] = scale * (q - zero), in fp32."""
    scales = tensors["scale"].reshape(n, fmt.groups(k)).T
    groups = integers.group_of_k(fmt, tensors.get("g_idx"), k, scales.device)
    zeros = unpack_zeros(fmt, tensors, n, k)
    return integers.apply_scales(unpack(fmt, tensors, n, k), zeros, scales, groups)


def quantize(
    fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None, scale_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """W fp32 [N, K] rounded to nearest, with scales of one of SCALE_DTYPES and, when asymmetric, `zero_point`.

    Raises:
        ArgumentError: act-order without g_idx.
    """
    groups = integers.group_of_k(fmt, g_idx, weight.shape[1], weight.device)
    codes, zeros, scales = integers.round_to_nearest(fmt, weight, groups, scale_dtype)
    tensors = {**pack(fmt, codes), "scale": scales.T.contiguous()}
    if not fmt.symmetric:
        tensors["zero_point"] = pack_zeros(fmt, zeros)
    if fmt.act_order:
        tensors["g_idx"] = groups.to(torch.int32)
    return tensors
