"""Experts: the matrices of one projection in NVFP4, each expert's tensors apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fanfold.kernels.nvfp4 import reference


@dataclass(frozen=True, eq=False)
class Experts:
    """W [N, K] of E experts; `checks` says what the tensors must be.

    Attributes:
        name: the projection, as the arguments of an operation call it: `gate`, `up`, `down`.
        packed: E2M1 codes uint8 [N, K/2] of each expert; None: it lives on another rank.
        scales: E4M3 (or its bytes) of each expert: [K/16, N], or `reference.swizzle`d; None where `packed` is.
        global_scales: one number a matrix; it multiplies.
        swizzled: the order of `scales`.
    """

    name: str
    packed: Sequence[Tensor | None]
    scales: Sequence[Tensor | None]
    global_scales: Sequence[float]
    swizzled: bool

    def matrix(self, expert: int, n: int, k: int) -> tuple[Tensor, Tensor] | None:
        """Codes uint8 [N, K/2] and scales E4M3 [N, K/16] of one expert."""
        packed, scales = self.packed[expert], self.scales[expert]
        if packed is None or scales is None:
            return None
        scales = reference.unswizzle(scales, n, k) if self.swizzled else scales.T
        return packed, scales.view(torch.float8_e4m3fn) if scales.dtype == torch.uint8 else scales


def product(
    packed: Tensor, scales: Tensor, rows: Tensor | None, offsets: Tensor, experts: Experts, alphas: Tensor, out: Tensor
) -> None:
    """`reference.product` of experts whose tensors lie apart; the form of `launch.product`."""
    n, k = out.shape[1], packed.shape[1] * 2
    weights = [experts.matrix(expert, n, k) for expert in range(len(experts.packed))]
    reference.product(packed, scales, rows, offsets, weights, alphas, out)
