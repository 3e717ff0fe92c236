"""Layers in parts, one for each rank, and their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from fanfold.distributed.exchange import RunExperts
from fanfold.distributed.placement import Placement
from fanfold.distributed.places import Places
from fanfold.layers.experts import Experts
from fanfold.layers.reference import LayerPairs
from fanfold.lora.convert import convert
from fanfold.lora.site import ExpertPairs
from fanfold.spec import ExpertWeights
from fanfold.spec.weights import ProjectionWeights


def part(weights: ExpertWeights, experts: Sequence[int]) -> ExpertWeights:
    """Some experts of a layer."""

    def of(projection: ProjectionWeights) -> ProjectionWeights:
        chosen = list(experts)
        bias = None if projection.bias is None else projection.bias[chosen]
        tensors = {name: tensor[chosen] for name, tensor in projection.tensors.items()}
        return replace(projection, tensors=tensors, bias=bias)

    return ExpertWeights(of(weights.gate_up), of(weights.down))


def put_pairs(layer: Experts, pairs: LayerPairs, slots: int, experts: Sequence[int]) -> None:
    """Fills a layer of some experts with their pairs, as a pool does."""
    layer.reserve(slots, 16)
    for slot in range(slots):
        own = {
            (name, number): pairs[name][slot, expert]
            for name in pairs
            for number, expert in enumerate(experts)
            if (slot, expert) in pairs[name]
        }
        layer.put(slot, cast("ExpertPairs", convert(cast("ExpertPairs", own), layer)))


class OneAfterAnother:
    """All ranks of an all-reduce in one process: what each of them makes, added up."""

    def __init__(self, placement: Placement, parts: Sequence[Experts]) -> None:
        self._parts = parts
        self._places = [Places(placement, rank, own.device) for rank, own in enumerate(parts)]

    def __call__(
        self, run: RunExperts, hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None
    ) -> Tensor:
        """See Exchange; `run` is of no use here."""
        ranks = zip(self._parts, self._places, strict=True)
        made = [own.run(hidden, places.local_ids(ids), weights, adapter_ids) for own, places in ranks]
        return torch.stack(made).sum(0)
