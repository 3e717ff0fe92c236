"""AWQ's gemm layout: codes and zero points packed along N, eight 4-bit columns a word in an order of its own.

`qweight` int32 [K, N/8], `qzeros` int32 [G, N/8], `scales` [G, N]. The zero is stored as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fanfold.errors import UnsupportedError
from fanfold.formats import integers
from fanfold.formats.fields import SCALE_DTYPES, Field, require_multiple
from fanfold.formats.words import pack_words, unpack_words
from fanfold.spec.weight_format import WeightFormat

FIELDS: Mapping[str, tuple[str, ...]] = {
    "qweight": ("qweight",),
    "qzeros": ("qzeros",),
    "scales": ("scales",),
}
# Nibble i of a word (from the lowest bits) holds column ORDER[i] of its eight; column j is in NIBBLE_OF[j].
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be. Symmetric files may lack `qzeros`.

    Raises:
        UnsupportedError: N is no multiple of 8, or the format is act-ordered (the layout has no g_idx).
    """
    require_multiple(fmt, "N", n, 8)
    require_multiple(fmt, "K", k, 1)
    if fmt.act_order:
        raise UnsupportedError(
            f"{fmt} act-order",
            found="act_order",
            expected="groups of consecutive k",
            next_step="AWQ files have no g_idx; correct the quantization config.",
        )
    groups = fmt.groups(k)
    return {
        "qweight": Field((k, n // 8), (torch.int32,)),
        "scales": Field((groups, n), SCALE_DTYPES),
        "qzeros": Field((groups, n // 8), (torch.int32,), required=not fmt.symmetric),
    }


def unpack(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """Codes uint8 [N, K]."""
    return _unpack_columns(tensors["qweight"], n).T.contiguous()


def pack(fmt: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """`qweight` of codes uint8 [N, K]; inverse of `unpack`.

    Raises:
        UnsupportedError: N is no multiple of 8.
        ArgumentError: a code is out of range.
    """
    require_multiple(fmt, "N", codes.shape[0], 8)
    return {"qweight": _pack_columns(codes.T)}


def unpack_zeros(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """True zero points int32 [G, N]; symmetric formats have 2^(bits-1) whatever `qzeros` holds."""
    if fmt.symmetric:
        return integers.symmetric_zeros(fmt, n, k, tensors["scales"].device)
    return _unpack_columns(tensors["qzeros"], n).to(torch.int32)


def pack_zeros(fmt: WeightFormat, zeros: Tensor) -> Tensor:
    """`qzeros` of true zero points [G, N] in [0, 16).

    Raises:
        UnsupportedError: N is no multiple of 8.
        ArgumentError: a zero point is out of range.
    """
    require_multiple(fmt, "N", zeros.shape[1], 8)
    return _pack_columns(zeros)


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W fp32 [N, K] = scale * (q - zero), in fp32."""
    groups = integers.group_of_k(fmt, None, k, tensors["scales"].device)
    zeros = unpack_zeros(fmt, tensors, n, k)
    return integers.apply_scales(unpack(fmt, tensors, n, k), zeros, tensors["scales"], groups)


def quantize(fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """W fp32 [N, K] rounded to nearest, with fp16 scales and `qzeros`.

    Raises:
        UnsupportedError: N is no multiple of 8.
    """
    shapes(fmt, *weight.shape)
    groups = integers.group_of_k(fmt, g_idx, weight.shape[1], weight.device)
    codes, zeros, scales = integers.round_to_nearest(fmt, weight, groups, torch.float16)
    return {**pack(fmt, codes), "qzeros": pack_zeros(fmt, zeros), "scales": scales}


def _unpack_columns(words: Tensor, n: int) -> Tensor:
    nibbles = unpack_words(words, 4, n).reshape(-1, n // 8, 8)
    return nibbles[..., list(NIBBLE_OF)].flatten(-2)


def _pack_columns(values: Tensor) -> Tensor:
    return pack_words(values.reshape(len(values), -1, 8)[..., list(ORDER)].flatten(-2), 4)
