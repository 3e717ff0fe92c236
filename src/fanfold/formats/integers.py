"""What the integer formats share: groups, zero points, scale * (q - zero), and rounding to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.weight_format import WeightFormat


def group_of_k(fmt: WeightFormat, g_idx: Tensor | None, k: int, device: torch.device) -> Tensor:
    """The scale group of each k, int64 [K]: `g_idx` with act-order, else k // group_size.

    Raises:
        ArgumentError: the format is act-ordered and there is no g_idx.
    """
    if not fmt.act_order:
        return torch.arange(k, device=device) // (k if fmt.group_size == -1 else fmt.group_size)
    if g_idx is None:
        raise ArgumentError(
            f"{fmt} g_idx",
            found="none",
            expected=f"int32 [{k}], the scale group of each k",
            next_step="Pass g_idx, or a format without act_order.",
        )
    return g_idx.to(torch.int64)


def symmetric_zeros(fmt: WeightFormat, n: int, k: int, device: torch.device) -> Tensor:
    """The zero points of a symmetric format, int32 [G, N]: 2^(bits-1), the middle of the codes."""
    return torch.full((fmt.groups(k), n), 1 << (fmt.bits - 1), dtype=torch.int32, device=device)


def apply_scales(codes: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor) -> Tensor:
    """W = scale * (q - zero) in fp32: the difference is an exact integer, so one rounding a weight.

    Args:
        codes: uint8 [N, K].
        zeros: int32 [G, N].
        scales: fp16, bf16 or fp32 [G, N].
        groups: int64 [K], the group of each k.

    Returns:
        fp32 [N, K].
    """
    zero_of_weight = zeros.T.index_select(1, groups)
    scale_of_weight = scales.T.float().index_select(1, groups)
    return scale_of_weight * (codes.to(torch.int32) - zero_of_weight).float()


def round_to_nearest(
    fmt: WeightFormat, weight: Tensor, groups: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Plain rounding of W: amax a group when symmetric, minimum and maximum (with 0 between them) when not.

    Args:
        fmt: an integer format.
        weight: fp32 [N, K], finite.
        groups: int64 [K], the group of each k.
        dtype: of the scales; codes are rounded against the scales as stored.

    Returns:
        codes uint8 [N, K], zeros int32 [G, N], scales [G, N].
    """
    n, k = weight.shape
    largest_code = (1 << fmt.bits) - 1
    nothing = torch.zeros(n, fmt.groups(k), device=weight.device)
    index = groups.expand(n, k)
    high = nothing.scatter_reduce(1, index, weight, "amax")
    low = nothing.scatter_reduce(1, index, weight, "amin")
    if fmt.symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / largest_code).clamp(max=torch.finfo(dtype).max).to(dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    if fmt.symmetric:
        zeros = symmetric_zeros(fmt, n, k, weight.device).T
    else:
        zeros = (-low / scales.float()).round().clamp(0, largest_code).to(torch.int32)
    steps = (weight / scales.float().gather(1, index)).round()
    codes = (steps + zeros.gather(1, index)).clamp(0, largest_code).to(torch.uint8)
    return codes, zeros.T.contiguous(), scales.T.contiguous()
