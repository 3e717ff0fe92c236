"""The tensors of a packed projection as kernels are given them: a pointer and the strides of its axes.

A stride is a number of elements of the tensor. Where several values share a word, that of n (or k) leads from one
word to the next. Formats that differ in the order of their axes alone differ in strides alone.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Codes(NamedTuple):
    """Codes (or plain numbers) [E, P, N, K], the last two in any order."""

    ptr: Tensor
    stride_e: int
    stride_p: int
    stride_n: int
    stride_k: int


class Scales(NamedTuple):
    """Scales [E, P, ceil(N / rows), G], the last two in any order; group g holds inputs from g * group_size on."""

    ptr: Tensor | None
    stride_e: int
    stride_p: int
    stride_n: int
    stride_g: int
    rows: int
    group_size: int


class Zeros(NamedTuple):
    """Packed zero points [E, P, words along N, G], the last two in any order."""

    ptr: Tensor | None
    stride_e: int
    stride_p: int
    stride_n: int
    stride_g: int


class Order(NamedTuple):
    """g_idx int32 [E, P, K], the group of each input, of act-ordered formats."""

    ptr: Tensor | None
    stride_e: int
    stride_p: int


class RowScales(NamedTuple):
    """Scales fp32 [R, G] of activations in 8 bits; group g holds inputs from g * group_size on."""

    ptr: Tensor | None
    stride_t: int
    stride_g: int
    group_size: int
