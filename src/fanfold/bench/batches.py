"""Batches: random hidden states, and routings of three kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from fanfold.bench.jobs import LayerShape

Routing = Literal["uniform", "balanced", "power"]
ROUTINGS: tuple[Routing, ...] = ("uniform", "balanced", "power")


@dataclass(frozen=True, eq=False)
class Batch:
    """What one call of a layer gets.

    Attributes:
        hidden: [T, H].
        topk_ids: int32 [T, k].
        topk_weights: fp32 [T, k], summing to 1 a token.
    """

    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor

    def __getitem__(self, tokens: Tensor) -> Batch:
        """Some of the tokens."""
        return Batch(self.hidden[tokens], self.topk_ids[tokens], self.topk_weights[tokens])


def experts_met(batch: Batch) -> Tensor:
    """The experts that a batch meets, ascending."""
    return cast("Tensor", torch.unique(batch.topk_ids, sorted=True))


def random_batch(
    shape: LayerShape, tokens: int, routing: Routing, dtype: torch.dtype, device: torch.device, seed: int
) -> Batch:
    """Normal hidden states and a routing; the routing of a seed is the same on every device."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(tokens, shape.experts.hidden, generator=generator, device=device).to(dtype)
    ids, weights = random_routing(routing, tokens, shape.experts.num_experts, shape.top_k, seed)
    return Batch(hidden, ids.to(device), weights.to(device))


def random_routing(routing: Routing, tokens: int, experts: int, top_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids without repetition in a token, and their weights.

    `uniform`: every expert is as likely as any other. `balanced`: all experts have the same number of rows, within 1.
    `power`: the n-th most popular expert is drawn with a weight of 1/n.

    Returns:
        int32 [T, k] and fp32 [T, k] on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(experts, generator=generator)
    if routing == "balanced":
        turns = order[torch.arange(tokens * top_k) % experts].view(tokens, top_k)
        ids = turns[torch.randperm(tokens, generator=generator)]
        chosen = torch.randn(tokens, top_k, generator=generator)
    else:
        scores = torch.randn(tokens, experts, generator=generator)
        if routing == "power":
            # the k largest of log p + Gumbel noise are k draws of p without replacement
            noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()
            scores = noise - (order + 1.0).log()
        chosen, ids = scores.topk(top_k)
    return ids.int(), chosen.softmax(-1)
