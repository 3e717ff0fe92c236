"""The grouped product in readable torch (semantics: steps 3 and 5 of the layer; activations in 8 bits)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad as zero_pad

from fanfold.kernels.common.invariant import invariant_matmul

LARGEST = 448.0  # of E4M3


def grouped(
    x: Tensor, weight_of: Callable[[int], Tensor], expert_offsets: Tensor, n: int, bias: Tensor | None = None
) -> Tensor:
    """act(x W[e]^T + bias[e]) of rows that lie in expert order.

    Args:
        x: [R, K], rows in expert order; expert e owns [expert_offsets[e], expert_offsets[e+1]).
        weight_of: expert -> W fp32 [N, K]. Called once for each expert that has rows.
        expert_offsets: int32 [E+1].
        n: N.
        bias: [E, N] or None.

    Returns:
        [R, N] in x's dtype: fp32 sums, rounded once. Rows of no expert are 0.
    """
    out = torch.zeros((x.shape[0], n), dtype=x.dtype, device=x.device)
    offsets = cast("list[int]", expert_offsets.tolist())
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        y = invariant_matmul(x[start:end].float(), weight_of(expert))
        out[start:end] = (y if bias is None else y + bias[expert].float()).to(x.dtype)
    return out


def quantize_rows(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """x ~ numbers * scales, each row and group with a scale of its own.

    Args:
        x: [R, K] in fp16, bf16 or fp32.
        group_size: inputs that share a scale; the last group may be short.

    Returns:
        E4M3 [R, K]: x / scale in fp32, to nearest even; and fp32 [R, ceil(K / group_size)]: amax / 448, 1 where that
        is 0.
    """
    rows, k = x.shape
    groups = zero_pad(x.float(), (0, -k % group_size)).view(rows, -1, group_size)
    largest = groups.abs().amax(2)
    scales = largest / largest.new_full((), LARGEST)  # CUDA multiplies by the reciprocal of a plain number
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    numbers = (groups / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return numbers.view(rows, -1)[:, :k], scales


def dequantize_rows(numbers: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """fp32 [R, K] = numbers * scales: what a product with quantised activations multiplies."""
    return numbers.float() * scales.repeat_interleave(group_size, 1)[:, : numbers.shape[1]]
