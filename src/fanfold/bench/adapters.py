"""Adapters: random pairs for every expert and projection, and which token has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fanfold.bench.jobs import LayerShape
from fanfold.bench.seeds import generator_of
from fanfold.layers.reference import LayerPairs
from fanfold.lora.adapter import Projection
from fanfold.spec.lora import LoraPair, padded_rank

Popularity = Literal["identical", "uniform", "skewed", "distinct", "none"]
POPULARITIES: tuple[Popularity, ...] = ("identical", "uniform", "skewed", "distinct", "none")

Pairs = dict[tuple[Projection, int], LoraPair]


def adapter_ids(popularity: Popularity, tokens: int, adapters: int, seed: int) -> Tensor:
    """The adapter of each token.

    `identical`: all have the first. `uniform`: each adapter is as likely as any other. `skewed`: the n-th is drawn with
    a weight of 1/n. `distinct`: the adapters in turn, so that neighbours differ. `none`: all tokens are the base's,
    beside loaded adapters.

    Returns:
        int32 [T] on the CPU, -1 = base.
    """
    if popularity in ("identical", "none"):
        return torch.full((tokens,), 0 if popularity == "identical" else -1, dtype=torch.int32)
    if popularity == "distinct":
        return torch.arange(tokens, dtype=torch.int32) % adapters
    weights = 1.0 / (torch.arange(adapters) + 1) if popularity == "skewed" else torch.ones(adapters)
    return weights.multinomial(tokens, replacement=True, generator=generator_of("adapters", seed)).int()


def random_pairs(shape: LayerShape, rank: int, dtype: torch.dtype, device: torch.device, seed: int) -> Pairs:
    """A pair for every expert and projection, whose changes are about half as large as what they change.

    Stored as kernels read them: A [padded rank, K] and B [N, padded rank], zeros behind the rank.
    """
    generator = generator_of("pairs", seed, device)
    experts, hidden, intermediate = shape.experts.num_experts, shape.experts.hidden, shape.experts.intermediate
    sizes: dict[Projection, tuple[int, int]] = {"up": (hidden, intermediate), "down": (intermediate, hidden)}
    if shape.experts.gated:
        sizes["gate"] = hidden, intermediate
    padded = padded_rank(rank)
    pairs: Pairs = {}
    for projection, (k, n) in sizes.items():
        a = torch.zeros(experts, padded, k, dtype=dtype, device=device)
        b = torch.zeros(experts, n, padded, dtype=dtype, device=device)
        a[:, :rank] = torch.randn(experts, rank, k, generator=generator, device=device) * k**-0.5
        b[:, :, :rank] = torch.randn(experts, n, rank, generator=generator, device=device) * rank**-0.5
        for expert in range(experts):
            pairs[projection, expert] = LoraPair(a[expert, :rank], b[expert, :, :rank], 0.5)
    return pairs


def layer_pairs(adapters: Sequence[Pairs]) -> LayerPairs:
    """The pairs of all adapters as the reference takes them; an adapter's slot is its place."""
    found: dict[str, dict[tuple[int, int], LoraPair]] = {"gate": {}, "up": {}, "down": {}}
    for slot, pairs in enumerate(adapters):
        for (projection, expert), pair in pairs.items():
            found[projection][slot, expert] = pair
    return found


def pair_bytes(shape: LayerShape, rank: int, dtype: torch.dtype) -> int:
    """Stored bytes of one expert's pairs, all projections."""
    sizes = shape.experts
    return (sizes.halves + 1) * (sizes.hidden + sizes.intermediate) * padded_rank(rank) * dtype.itemsize


def pair_flops(shape: LayerShape, rank: int) -> int:
    """Multiplications and additions of one row through the pairs of one expert."""
    sizes = shape.experts
    return 2 * (sizes.halves + 1) * (sizes.hidden + sizes.intermediate) * rank
