"""Batches: random hidden states, and routings of four kinds or recorded ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from fanfold.bench.jobs import LayerShape
from fanfold.bench.recorded import Recorded
from fanfold.bench.seeds import generator_of

Routing = Literal["uniform", "balanced", "power", "hot"]
ROUTINGS: tuple[Routing, ...] = ("uniform", "balanced", "power", "hot")


@dataclass(frozen=True, eq=False)
class Batch:
    """What one call of a layer gets.

    Attributes:
        hidden: [T, H].
        topk_ids: int32 [T, k].
        topk_weights: fp32 [T, k], summing to 1 a token.
        adapter_ids: int32 [T], or None for the base.
    """

    hidden: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    adapter_ids: Tensor | None = None

    def __getitem__(self, tokens: Tensor) -> Batch:
        """Some of the tokens."""
        ids = None if self.adapter_ids is None else self.adapter_ids[tokens]
        return Batch(self.hidden[tokens], self.topk_ids[tokens], self.topk_weights[tokens], ids)


def experts_met(batch: Batch) -> Tensor:
    """The experts that a batch meets, ascending."""
    return cast("Tensor", torch.unique(batch.topk_ids, sorted=True))


def load(batch: Batch, experts: int) -> float:
    """The most rows of an expert over the mean of all experts; 1 = all alike, 0 without rows."""
    rows = batch.topk_ids.flatten().long().bincount(minlength=experts)
    return float(rows.max() * experts / rows.sum().clamp(min=1))


def pairs_met(batch: Batch) -> int:
    """How many (adapter, expert) a batch meets."""
    if batch.adapter_ids is None:
        return 0
    pairs = (batch.adapter_ids[:, None].long() << 32) | batch.topk_ids
    return len(cast("Tensor", torch.unique(pairs[batch.adapter_ids >= 0])))


def random_batch(
    shape: LayerShape,
    tokens: int,
    routing: Routing | Recorded,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    adapter_ids: Tensor | None = None,
) -> Batch:
    """Normal hidden states and a routing; the routing of a seed is the same on every device.

    Raises:
        ArgumentError: a recorded routing of another model.
    """
    generator = generator_of("hidden", seed, device)
    hidden = torch.randn(tokens, shape.experts.hidden, generator=generator, device=device).to(dtype)
    if isinstance(routing, Recorded):
        ids = routing.draw(shape, tokens, seed)
        weights = torch.randn(ids.shape, generator=generator_of("routing", seed)).softmax(-1)
    else:
        ids, weights = random_routing(routing, tokens, shape.experts.num_experts, shape.top_k, seed)
    adapters = None if adapter_ids is None else adapter_ids.to(device)
    return Batch(hidden, ids.to(device), weights.to(device), adapters)


def random_routing(routing: Routing, tokens: int, experts: int, top_k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids without repetition in a token, and their weights.

    `uniform`: every expert is as likely as any other. `balanced`: all experts have the same number of rows, within 1.
    `power`: the n-th most popular expert is drawn with a weight of 1/n. `hot`: every token has one expert among its
    own, the same for all; the others are as likely as each other.

    Returns:
        int32 [T, k] and fp32 [T, k] on the CPU.
    """
    generator = generator_of("routing", seed)
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
        elif routing == "hot":
            scores[:, order[0]] = scores.amax(-1) + 1.0
        chosen, ids = scores.topk(top_k)
    return ids.int(), chosen.softmax(-1)
