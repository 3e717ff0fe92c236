"""What tests of the Hopper product share: random projections of every format, and what a prepared form holds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fanfold.formats import codec, e2m1
from fanfold.formats.mxfp4 import decode_scale
from fanfold.formats.stack import stack
from fanfold.kernels.grouped.sm90.fragments import e2m1_codes, from_fragments, separate
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.spec import ProjectionWeights, WeightFormat
from samples import random_projection

INTEGERS = [
    *(f"gptq4-g{group}" for group in (32, 64, 128)),
    *(f"gptq4-g{group}-asym-{version}" for group in (32, 64, 128) for version in ("v1", "v2")),
    "awq4-g32",
    "awq4-g64-asym",
    "awq4-g128-asym",
    "packed4-g32-asym",
    "packed4-g64",
    "packed4-g128-asym",
]
FP4 = ["nvfp4", "nvfp4-divisor", "mxfp4"]


def integers(
    name: str, experts: int, halves: int, n: int, k: int, *, exact: bool = False, seed: int = 0
) -> ProjectionWeights:
    """Random codes and zero points, each of 0 to 15; exact: scales 1 and 1/2, so that small products are exact."""
    fmt = WeightFormat.parse(name)
    module, groups = codec.INTEGER[fmt.kind], fmt.groups(k)
    generator = torch.Generator().manual_seed(seed)
    rows: list[list[dict[str, Tensor]]] = []
    for _ in range(experts):
        row: list[dict[str, Tensor]] = []
        for _ in range(halves):
            codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
            zeros = torch.randint(0, 16, (groups, n), generator=generator, dtype=torch.int32)
            scales = (torch.rand(groups, n, generator=generator) + 0.5) * 0.25 * k**-0.5
            if exact:
                scales = torch.where(torch.rand(groups, n, generator=generator) < 0.5, 1.0, 0.5)
            tensors = module.pack(fmt, codes)
            if fmt.kind == "packed":
                tensors["scale"] = scales.T.contiguous().bfloat16()
            else:
                tensors["scales"] = scales.half()
            if not fmt.symmetric:
                tensors["zero_point" if fmt.kind == "packed" else "qzeros"] = module.pack_zeros(fmt, zeros)
            row.append(tensors)
        rows.append(row)
    return stack(fmt, rows, n=n, k=k)


def projection(name: str, experts: int, halves: int, n: int, k: int, seed: int = 0) -> ProjectionWeights:
    if name in FP4:
        return random_projection(name, experts, halves, n, k, seed)
    return integers(name, experts, halves, n, k, seed=seed)


def unpacked(weights: FragmentWeights, expert: int) -> tuple[Tensor, Tensor]:
    """Of one expert, [P, N, K]: what the kernel multiplies by the scales, and the scales, both in fp32.

    Padding must be zeros that give zero.
    """
    group, one = weights.format.group_size, slice(expert, expert + 1)
    if weights.fp4_group:
        values = e2m1.decode(e2m1_codes(weights.words[one]))
        stored = (
            weights.scales[one].contiguous().view(torch.uint8).reshape(1, -1, weights.padded_k // 64, 64, 64 // group)
        )
        stored = stored.transpose(2, 3).reshape(1, weights.rows, -1)
        if group == 16:
            scales = (1 + (stored & 7).float() / 8) * 2.0 ** ((stored >> 3).float() - 21)
        else:
            scales = decode_scale(stored - 118)
    else:
        values = from_fragments(weights.words[one]).float()
        zeros = 8.0 if weights.zeros is None else _by_row(weights.zeros[one]).float().repeat_interleave(group, 2)
        values, scales = values - zeros, _by_row(weights.scales[one]).float()
    scales = scales.repeat_interleave(group, 2)
    rows = weights.n * weights.halves
    assert not (values * scales)[:, rows:].any()
    assert not (values * scales)[:, :, weights.k :].any()
    values, scales = (separate(part[:, :rows, : weights.k], weights.halves)[0] for part in (values, scales))
    return values, scales


def _by_row(values: Tensor) -> Tensor:
    """[E, NR/64, G, 64] -> [E, NR, G]."""
    return values.transpose(2, 3).flatten(1, 2)


def to_device(weights: ProjectionWeights, device: str) -> ProjectionWeights:
    tensors = {name: tensor.to(device) for name, tensor in weights.tensors.items()}
    bias = None if weights.bias is None else weights.bias.to(device)
    return ProjectionWeights(weights.format, weights.n, weights.k, tensors, bias)


def with_bias(weights: ProjectionWeights, dtype: torch.dtype = torch.bfloat16) -> ProjectionWeights:
    """The projection with a random bias."""
    generator = torch.Generator().manual_seed(weights.n)
    shape = (weights.num_experts, weights.halves, weights.n)
    return replace(weights, bias=torch.randn(shape, generator=generator).to(dtype))
