"""Weights as NVFP4, by the two-level rules, all matrices in one launch behind their maxima."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.kernels.nvfp4.pack import pack_rows
from fanfold.kernels.nvfp4.reference import LARGEST_CODE, LARGEST_SCALE


def pack_weights(weights: Tensor, *, divisor: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and global scales; the bits of `formats.nvfp4.quantize` of each matrix in fp32.

    Args:
        weights: [E, N, K] in bf16, fp16 or fp32, finite.
        divisor: global scales divide (2688 / amax) instead of multiplying (amax / 2688).
        transposed: scales [E, K/16, N] instead of [E, N, K/16].

    Returns:
        uint8 [E, N, K/2], E4M3 scales, fp32 [E].

    Raises:
        UnavailableError: the weights are where no kernel runs.
    """
    experts, n, k = weights.shape
    least, most = torch.aminmax(weights.flatten(1), dim=1)  # reads once, and makes no copy of sizes
    amax = torch.maximum(-least, most).float()
    largest = LARGEST_CODE * LARGEST_SCALE
    # A number by a tensor is a product with its reciprocal in torch, so also where compressed-tensors makes a divisor.
    scales = amax.reciprocal() * largest if divisor else amax / torch.full_like(amax, largest)
    scales = torch.where(torch.isfinite(scales) & (scales > 0), scales, 1.0)
    packed, group_scales = pack_rows(
        weights.view(-1, k), scales, rows_per_scale=n, divide=divisor, transposed=transposed
    )
    shape = (experts, k // 16, n) if transposed else (experts, n, k // 16)
    return packed.view(experts, n, k // 2), group_scales.view(shape), scales
