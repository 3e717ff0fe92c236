"""FragmentWeights: one projection of all experts as the Hopper product reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped.sm90.fragments import TILE, WORDS
from fanfold.kernels.grouped.sm90.supported import FP4_GROUPS
from fanfold.spec.weight_format import WeightFormat

PADDING = 2 * TILE
"""Rows and inputs are padded to multiples of this, so that a stage of 128 inputs and 128 rows a program always fit."""
SCALES = {16: torch.int32, 32: torch.int16}
"""Dtype of a row's scales of a tile of E2M1 codes, by group."""


@dataclass(frozen=True, eq=False)
class FragmentWeights:
    """One projection of all experts in fragment order (`fragments`), gate and up in turn by eights.

    Made by `prepare` or `prepare_layer`. Rows and inputs are padded with zeros to multiples of 128: NR >= P*N, KP >= K.

    Where down has act-order, its inputs lie sorted by group, and the outputs of gate and up in the same order, so
    that h needs no reordering: column j of h (and of gate and up in y1) of a row of expert e is the file's output
    hidden_order[e, j] of gate and up, and so the file's input of that number of down. Whoever adds to y1 or reads h
    (LoRA) must follow it.

    Attributes:
        format: as the weights lay on disk.
        n: outputs of one half.
        k: inputs.
        halves: P, 2 for gate and up, 1 for down and for up without a gate.
        words: int32 [E, NR/64, KP/64, 512].
        scales: fp16 [E, NR/64, KP/G, 64]; of E2M1 codes [E, NR/64, KP/64, 64], the `scale_bytes` of a row of a tile in
            one word: int32 for NVFP4, int16 for MXFP4.
        zeros: zero points uint8, shaped as scales, of asymmetric integers.
        global_scale: of E2M1 codes: fp32 [E, P], by which a whole matrix is multiplied; ones for MXFP4, and for NVFP4
            files that store a divisor its rounded reciprocal.
        bias: fp32 [E, P, N], added before the outputs are rounded.
        order: int32 [E, K] of gate and up with act-order: sorted input j is the file's input order[e, j]. The launch
            brings x into that order.
        hidden_order: int32 [E, I], see above; the same of both projections of a layer. None: as in the file.
        short_scales: whether bf16 holds the scales of integers, so that weights take fewer instructions.
        launches: compiled kernels and their constants, as `launch` keeps them.

    Raises:
        ArgumentError: a tensor is not as said here; names it.
    """

    format: WeightFormat
    n: int
    k: int
    halves: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    global_scale: Tensor | None = None
    bias: Tensor | None = None
    order: Tensor | None = None
    hidden_order: Tensor | None = None
    short_scales: bool = False
    launches: dict[Any, tuple[Any, tuple[Any, ...]]] = field(
        default_factory=dict[Any, tuple[Any, tuple[Any, ...]]], init=False, repr=False
    )

    def __post_init__(self) -> None:
        experts, slabs, tiles = self.num_experts, self.rows // TILE, self.padded_k // TILE
        _check("words", self.words, [experts, slabs, tiles, WORDS], torch.int32, self.words)
        if slabs % 2 or self.rows < self.n * self.halves or tiles % 2 or self.padded_k < self.k:
            raise _wrong("words", describe(self.words), f"tiles of 64 x 64 for [{self.n * self.halves}, {self.k}]")
        group, fp4 = self.format.group_size, bool(self.fp4_group)
        shape = [experts, slabs, tiles if fp4 else self.padded_k // group, TILE]
        _check("scales", self.scales, shape, SCALES.get(self.fp4_group, torch.float16), self.words)
        needed = {"zeros": not fp4 and not self.format.symmetric, "global_scale": fp4}
        for name, wanted in needed.items():
            if wanted != (getattr(self, name) is not None):
                raise _wrong(name, "nothing" if wanted else "a tensor", "a tensor" if wanted else "nothing")
        optional = {
            "zeros": (self.zeros, shape, torch.uint8),
            "global_scale": (self.global_scale, [experts, self.halves], torch.float32),
            "bias": (self.bias, [experts, self.halves, self.n], torch.float32),
            "order": (self.order, [experts, self.k], torch.int32),
        }
        for name, (tensor, sizes, dtype) in optional.items():
            if tensor is not None:
                _check(name, tensor, sizes, dtype, self.words)

    @cached_property
    def num_experts(self) -> int:
        """E."""
        return self.words.shape[0]

    @cached_property
    def rows(self) -> int:
        """NR."""
        return self.words.shape[1] * TILE

    @cached_property
    def padded_k(self) -> int:
        """KP."""
        return self.words.shape[2] * TILE

    @property
    def nbytes(self) -> int:
        """Resident bytes; `hidden_order`, which both projections of a layer have, is counted with gate_up."""
        order = None if self.order is None and self.halves == 1 else self.hidden_order
        tensors = (self.words, self.scales, self.zeros, self.global_scale, self.bias, self.order, order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @cached_property
    def fp4_group(self) -> int:
        """Codes that share a scale, of E2M1 codes; 0 for integers."""
        return FP4_GROUPS.get(self.format.kind, 0)


def padded(size: int) -> int:
    """Rows or inputs, as they are held."""
    return -(-size // PADDING) * PADDING


def _check(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype, words: Tensor) -> None:
    if list(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise _wrong(name, describe(tensor), f"contiguous {str(dtype).removeprefix('torch.')} {shape}")
    if tensor.device != words.device:
        raise _wrong(name, str(tensor.device), f"{words.device}, where words are")


def _wrong(name: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"FragmentWeights.{name}", found=found, expected=expected, next_step="Pass what `prepare` made, unchanged."
    )


def describe(tensor: Tensor) -> str:
    """Dtype, shape and, where they say more, strides of a tensor."""
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strides}"
