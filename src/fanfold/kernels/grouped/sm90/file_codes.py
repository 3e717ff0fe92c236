"""Codes and zero points of files, unpacked for a few experts at a time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fanfold.spec.weight_format import WeightFormat

# Nibble i of an AWQ word holds column 0, 2, 4, 6, 1, 3, 5, 7; column j is in this nibble.
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
ONES = 0x11111111
"""A 1 in each nibble: what writers of GPTQ's "v1" subtract from a word of zero points."""


def codes(fmt: WeightFormat, tensors: Mapping[str, Tensor], k: int) -> Tensor:
    """Codes uint8 [E, P, N, K] of 4-bit weights.

    Args:
        fmt: GPTQ, AWQ or pack-quantized integers, NVFP4 or MXFP4.
        tensors: [E, P, ...].
        k: K.
    """
    if fmt.kind == "gptq":
        return _nibbles(tensors["qweight"].transpose(-2, -1))
    if fmt.kind == "awq":
        return _awq_columns(tensors["qweight"]).transpose(-2, -1)
    return _nibbles(tensors["packed"])[..., :k]


def zero_points(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int) -> Tensor:
    """Zero points uint8 [E, P, N, G] of asymmetric 4-bit integers.

    Args:
        fmt: GPTQ, AWQ or pack-quantized.
        tensors: [E, P, ...].
        n: N.
    """
    if fmt.kind == "gptq":
        # A zero of 0 borrowed from its neighbour; one addition of the whole word gives it back.
        stored = tensors["qzeros"]
        return _nibbles(stored + ONES if fmt.zero_point == "v1" else stored).transpose(-2, -1)
    if fmt.kind == "awq":
        return _awq_columns(tensors["qzeros"]).transpose(-2, -1)
    return _nibbles(tensors["zero_point"].transpose(-2, -1))[..., :n].transpose(-2, -1)


def scales(fmt: WeightFormat, tensors: Mapping[str, Tensor]) -> Tensor:
    """Scales [E, P, N, G] as they are stored."""
    return tensors["scales"].transpose(-2, -1) if fmt.kind in ("gptq", "awq") else tensors["scale"]


def _nibbles(words: Tensor) -> Tensor:
    """Words (or bytes) [..., W] -> uint8 [..., 8*W], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _awq_columns(words: Tensor) -> Tensor:
    """AWQ words [..., N/8] -> uint8 [..., N]."""
    nibbles = _nibbles(words)
    return nibbles.reshape(*nibbles.shape[:-1], -1, 8)[..., list(AWQ_NIBBLE)].flatten(-2)
