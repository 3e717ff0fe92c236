"""GPTQ: codes packed along K, zero points along N.

`qweight` int32 [K*bits/32, N], `qzeros` int32 [G, N*bits/32], `scales` [G, N], `g_idx` int32 [K].

Zero points of asymmetric files. "v2" stores the zero. "v1" stores the zero - 1, as the common writer
(gptqmodel) subtracts it. Where no zero is 0, undoing it is stored + 1. Where one is:

- 2, 4, 8 bits: the writer subtracts 1 from all fields of an int32 word at once (0x55555555, 0x11111111,
  0x01010101), so a zero of 0 borrows from the next field of its word. One addition of that word undoes it.
- 3 bits: fields 10 and 21 of 32 span two words, so no word can be corrected alone (adding a word of ones to
  a stored 3 in field 10 carries out of its word: 0, not 4). The writer takes the fields apart, subtracts 1
  modulo 8 and packs them again: nothing borrows, a zero of 0 is stored as 7. It is undone the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

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
    "g_idx": ("g_idx",),
}
# The fewest values that fill whole words.
VALUES_PER_STEP = {2: 16, 3: 32, 4: 8, 8: 4}
# A word of ones, one a field.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be.

    Symmetric files may lack `qzeros`, files without act-order may lack `g_idx`.

    Raises:
        UnsupportedError: K (or N, for stored zeros) does not fill whole words, or an asymmetric format does
            not say whether it stores the zero or the zero minus 1.
    """
    step = VALUES_PER_STEP[fmt.bits]
    require_multiple(fmt, "K", k, step)
    require_multiple(fmt, "N", n, 1 if fmt.symmetric else step)
    if not fmt.symmetric and fmt.zero_point is None:
        raise UnsupportedError(
            f"{fmt} zero points",
            found="neither v1 nor v2",
            expected='zero_point "v1" (zero - 1 is stored) or "v2" (the zero is stored)',
            next_step="Take it from checkpoint_format in the quantization config: gptq is v1, gptq_v2 is v2.",
        )
    groups = fmt.groups(k)
    fields = {
        "qweight": Field((k // step * (step * fmt.bits // 32), n), (torch.int32,)),
        "scales": Field((groups, n), SCALE_DTYPES),
        "g_idx": Field((k,), (torch.int32,), required=fmt.act_order),
    }
    if n % step == 0:
        fields["qzeros"] = Field((groups, n * fmt.bits // 32), (torch.int32,), required=not fmt.symmetric)
    return fields


def unpack(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """Codes uint8 [N, K]."""
    return unpack_words(tensors["qweight"].T, fmt.bits, k)


def pack(fmt: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """`qweight` of codes uint8 [N, K]; inverse of `unpack`.

    Raises:
        UnsupportedError: K does not fill whole words.
        ArgumentError: a code is out of range.
    """
    require_multiple(fmt, "K", codes.shape[1], VALUES_PER_STEP[fmt.bits])
    return {"qweight": pack_words(codes, fmt.bits).T.contiguous()}


def unpack_zeros(
    fmt: WeightFormat,
    tensors: Mapping[str, Tensor],
    n: int,
    k: int,
    v1: Literal["writer", "fields"] = "writer",
) -> Tensor:
    """True zero points int32 [G, N].

    Args:
        fmt: the format; symmetric ones have 2^(bits-1) whatever `qzeros` holds.
        tensors: the matrix.
        n: N.
        k: K.
        v1: how "v1" zeros are undone. `writer`: what the common writer did (see the top of this file).
            `fields`: each stored field + 1, unwrapped, so that 4-bit 15 gives 16, as kernels that know of no
            borrow have it.
    """
    if fmt.symmetric:
        return integers.symmetric_zeros(fmt, n, k, tensors["scales"].device)
    words = tensors["qzeros"]
    if fmt.zero_point == "v2":
        return unpack_words(words, fmt.bits, n).to(torch.int32)
    if v1 == "fields":
        return unpack_words(words, fmt.bits, n).to(torch.int32) + 1
    if fmt.bits == 3:
        return (unpack_words(words, 3, n).to(torch.int32) + 1) & 7
    return unpack_words(words + ONES[fmt.bits], fmt.bits, n).to(torch.int32)


def pack_zeros(fmt: WeightFormat, zeros: Tensor) -> Tensor:
    """`qzeros` of true zero points [G, N] in [0, 2^bits), as the common writer packs them; "v1" unless "v2".

    Raises:
        UnsupportedError: N does not fill whole words.
        ArgumentError: a zero point is out of range.
    """
    require_multiple(fmt, "N", zeros.shape[1], VALUES_PER_STEP[fmt.bits])
    if fmt.zero_point == "v2":
        return pack_words(zeros, fmt.bits)
    if fmt.bits == 3:
        return pack_words((zeros - 1) & 7, 3)
    return pack_words(zeros, fmt.bits) - ONES[fmt.bits]


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W fp32 [N, K] = scale * (q - zero), in fp32."""
    groups = integers.group_of_k(fmt, tensors.get("g_idx"), k, tensors["scales"].device)
    zeros = unpack_zeros(fmt, tensors, n, k)
    return integers.apply_scales(unpack(fmt, tensors, n, k), zeros, tensors["scales"], groups)


def quantize(fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """W fp32 [N, K] rounded to nearest, with fp16 scales and, where N fills whole words, `qzeros`.

    Raises:
        ArgumentError: act-order without g_idx.
        UnsupportedError: a size does not fill whole words.
    """
    n, k = weight.shape
    wanted = shapes(fmt, n, k)
    groups = integers.group_of_k(fmt, g_idx, k, weight.device)
    codes, zeros, scales = integers.round_to_nearest(fmt, weight, groups, torch.float16)
    tensors = {**pack(fmt, codes), "scales": scales}
    if "qzeros" in wanted:
        tensors["qzeros"] = pack_zeros(fmt, zeros)
    if fmt.act_order:
        tensors["g_idx"] = groups.to(torch.int32)
    return tensors
