"""Checking: a layer against fp32, as near as a plain evaluation in low precision."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fanfold.bench.batches import Batch, experts_met
from fanfold.formats.codec import dequantize_expert
from fanfold.layers.experts import Experts
from fanfold.layers.reference import LayerPairs, layer
from fanfold.spec.activation import Activation
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

TOKENS = 16
"""Tokens that are compared; the layer runs all of them."""


@dataclass(frozen=True)
class Check:
    """Differences from an evaluation in fp32 without rounding between the steps.

    Each beside that of a plain evaluation: weights rounded to the activations' dtype, every step rounded to it.

    Attributes:
        error: of the layer, norm of the difference over the norm.
        plain_error: of the plain evaluation.
        norm_off: of the layer, how far its norm is from the right one, over that.
        largest: of the layer, the largest difference of one value over the root mean square of all.
        plain_largest: of the plain evaluation.
    """

    error: float
    plain_error: float
    norm_off: float
    largest: float
    plain_largest: float

    @property
    def wrong(self) -> str | None:
        """Why the layer is wrong; None where it is right. NaN is wrong.

        A scale that is slightly off and a single wrong value both hide in the relative error: the norm shows the first,
        the largest difference the second.
        """
        limits = {
            "relative error": (self.error, 2 * self.plain_error),
            "norm off by": (self.norm_off, self.plain_error),
            "one value off by": (self.largest, 4 * self.plain_largest),
        }
        found = [
            f"{name} {value:.1e}, limit {limit:.1e}" for name, (value, limit) in limits.items() if not value < limit
        ]
        return "; ".join(found) or None


def check(experts: Experts, weights: ExpertWeights, batch: Batch, pairs: LayerPairs | None = None) -> Check:
    """Runs the layer on a batch and compares some of its tokens.

    Args:
        experts: the layer.
        weights: what it was made of.
        batch: hidden in bf16 or fp16.
        pairs: those of its adapters.
    """
    expected = Expected(weights, batch, experts.activation, pairs)
    dirty_memory(batch.hidden.device)
    return expected.check(experts(batch.hidden, batch.topk_ids, batch.topk_weights, batch.adapter_ids))


class Expected:
    """What some tokens of a batch should be, evaluated once for any number of outputs.

    Args:
        weights: of the layer.
        batch: hidden in bf16 or fp16.
        activation: between gate_up and down.
        pairs: of the adapters.
    """

    def __init__(
        self, weights: ExpertWeights, batch: Batch, activation: Activation, pairs: LayerPairs | None = None
    ) -> None:
        tokens = len(batch.hidden)
        self._places = torch.linspace(0, tokens - 1, min(tokens, TOKENS), device=batch.hidden.device).round().long()
        part = batch[self._places]
        self._exact = _evaluate(replace(part, hidden=part.hidden.float()), weights, pairs or {}, activation)
        self._plain = _evaluate(*_rounded(part, weights, pairs or {}), activation)

    def check(self, output: Tensor) -> Check:
        """How far a layer's output [T, H] is off."""
        found = output[self._places].double()
        (error, largest), (plain_error, plain_largest) = _off(found, self._exact), _off(self._plain, self._exact)
        return Check(error, plain_error, abs(_norm(found) / _norm(self._exact) - 1), largest, plain_largest)


def _off(values: Tensor, exact: Tensor) -> tuple[float, float]:
    """Norm of the difference over the norm; the largest difference over the root mean square."""
    norm = _norm(exact)
    return _norm(values - exact) / norm, float((values - exact).abs().max()) * exact.numel() ** 0.5 / norm


def _norm(values: Tensor) -> float:
    return float(values.square().sum().sqrt())


def _evaluate(batch: Batch, weights: ExpertWeights, pairs: LayerPairs, activation: Activation) -> Tensor:
    ids = batch.topk_ids, batch.topk_weights
    return layer(batch.hidden, *ids, weights, activation, pairs, batch.adapter_ids).double()


def _rounded(batch: Batch, weights: ExpertWeights, pairs: LayerPairs) -> tuple[Batch, ExpertWeights, LayerPairs]:
    """The experts that the batch meets, rounded to hidden's dtype; the batch and their pairs with their new numbers."""
    met = experts_met(batch)
    ids = torch.searchsorted(met, batch.topk_ids).int()
    places = {int(expert): place for place, expert in enumerate(met)}
    dtype = batch.hidden.dtype
    fmt = WeightFormat.parse("fp16" if dtype == torch.float16 else "bf16")

    def dense(projection: ProjectionWeights) -> ProjectionWeights:
        size = (len(met), projection.halves, projection.n, projection.k)
        weight = torch.empty(size, dtype=dtype, device=batch.hidden.device)
        for expert, place in places.items():
            for half in range(projection.halves):
                weight[place, half] = dequantize_expert(projection, expert, half)
        bias = None if projection.bias is None else projection.bias[met]
        return ProjectionWeights(fmt, projection.n, projection.k, {"weight": weight}, bias)

    rounded = ExpertWeights(dense(weights.gate_up), dense(weights.down))
    theirs = {
        name: {(slot, places[expert]): pair for (slot, expert), pair in found.items() if expert in places}
        for name, found in pairs.items()
    }
    return replace(batch, topk_ids=ids), rounded, theirs


def dirty_memory(device: torch.device) -> None:
    """Leaves NaN in the memory that the next tensors get, so that what a kernel does not write shows."""
    if device.type == "cuda":
        for size in (2**12, 2**16, 2**20, 2**26):
            torch.full((size,), torch.nan, device=device)
