"""Formats, weights and a second, slow way to read words, shared by the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.spec import WeightFormat

NAMES = [
    "bf16",
    "fp16",
    "fp32",
    *(f"gptq{bits}-g32" for bits in (2, 3, 4, 8)),
    *(f"gptq{bits}-g32-asym-{version}" for bits in (2, 3, 4, 8) for version in ("v1", "v2")),
    "gptq4-channel",
    "gptq8-channel-asym-v2",
    "gptq4-g64-actorder",
    "gptq3-g64-asym-v1-actorder",
    "awq4-g32",
    "awq4-g64-asym",
    "awq4-channel-asym",
    *(f"packed{bits}-g32" for bits in (2, 3, 4, 8)),
    *(f"packed{bits}-g32-asym" for bits in (2, 3, 4, 8)),
    "packed8-channel",
    "packed4-channel-asym",
    "packed4-g64-asym-actorder",
    "nvfp4",
    "nvfp4-divisor",
    "mxfp4",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block128x128",
    "fp8-block32x48",
]


def fmt_of(name: str) -> WeightFormat:
    return WeightFormat.parse(name)


def random_weight(n: int, k: int, seed: int = 0) -> Tensor:
    """Normal weights with one row of zeros and some larger values, as quantisers meet them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=generator) * 0.05
    weight[n // 2] = 0
    weight[0, ::7] *= 10
    return weight


def random_groups(fmt: WeightFormat, k: int, seed: int = 0) -> Tensor | None:
    """A shuffled g_idx for act-ordered formats, None for others."""
    if not fmt.act_order:
        return None
    size = k if fmt.group_size == -1 else fmt.group_size
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return (torch.arange(k) // size)[order].to(torch.int32)


def random_words(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def int32(*words: int) -> Tensor:
    """int32 of unsigned words."""
    return torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)


def stream_values(words: Tensor, bits: int, count: int) -> list[int]:
    """The values of one row of words, through one big Python integer."""
    stream = sum((int(word) & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
    return [stream >> (bits * i) & ((1 << bits) - 1) for i in range(count)]
