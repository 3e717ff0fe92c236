"""Peers: other libraries' expert layers on the same batches, verified and timed beside fanfold's in the same run.

They run dense weights: the same ones, dequantised and rounded to the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import silu

from fanfold.bench.batches import Batch
from fanfold.bench.checking import Check
from fanfold.bench.jobs import LayerShape
from fanfold.bench.timing import Times
from fanfold.formats.codec import dequantize_expert
from fanfold.spec.weights import ExpertWeights

Prepared = Callable[[], Tensor]
"""One call on a batch: [T, H]."""


@dataclass(frozen=True, eq=False)
class DenseExperts:
    """Dequantised weights.

    Attributes:
        shape: the layer, with gate and up, SiLU and no biases.
        gate_up: [E, 2 * I, H], gate's rows first.
        down: [E, H, I].
    """

    shape: LayerShape
    gate_up: Tensor
    down: Tensor


class Peer(Protocol):
    """A library's expert layer."""

    @property
    def name(self) -> str:
        """As rows have it."""
        ...

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph can hold its calls."""
        ...

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        """A call, with what an engine has ready before it: weights in their place, ids in their dtype."""
        ...


@dataclass(frozen=True)
class PeerFigure:
    """Of one peer and cell.

    Attributes:
        name: of the peer.
        check: against fp32, as for fanfold's layer; None where nothing ran.
        times: None where the check failed, or nothing ran.
        refused: why there are no times.
    """

    name: str
    check: Check | None = None
    times: Times | None = None
    refused: str | None = None

    def row(self, us: float | None) -> dict[str, Any]:
        """By name; `ratio` is the peer's time over fanfold's."""
        times = self.times
        return {
            "name": self.name,
            "median_us": None if times is None else times.median_us,
            "p20_us": None if times is None else times.p20_us,
            "p80_us": None if times is None else times.p80_us,
            "ratio": None if times is None or us is None else times.median_us / us,
            "error": None if self.check is None else self.check.error,
            "refused": self.refused,
        }


def refusal(shape: LayerShape, adapters: int) -> str | None:
    """Why no peer runs such a layer; None where they do."""
    if not shape.experts.gated or shape.activation.kind != "silu" or shape.bias:
        return "peers run SiLU with a gate, without biases"
    return "peers run no adapters by token" if adapters else None


def dense_experts(shape: LayerShape, weights: ExpertWeights, dtype: torch.dtype) -> DenseExperts:
    """The weights dequantised, a matrix at a time."""
    sizes = shape.experts
    device = next(iter(weights.down.tensors.values())).device
    gate_up = torch.empty(sizes.num_experts, 2 * sizes.intermediate, sizes.hidden, dtype=dtype, device=device)
    down = torch.empty(sizes.num_experts, sizes.hidden, sizes.intermediate, dtype=dtype, device=device)
    for expert in range(sizes.num_experts):
        for half in range(2):
            rows = slice(half * sizes.intermediate, (half + 1) * sizes.intermediate)
            gate_up[expert, rows] = dequantize_expert(weights.gate_up, expert, half)
        down[expert] = dequantize_expert(weights.down, expert, 0)
    return DenseExperts(shape, gate_up, down)


class TorchGroupedMm:
    """torch._grouped_mm with a sort of the rows before and index_add behind."""

    name = "torch"
    captured = True

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        """See Peer."""
        experts, top_k = dense.shape.experts.num_experts, dense.shape.top_k
        grouped_mm: Callable[..., Tensor] = cast("Any", torch)._grouped_mm
        gate_up, down = dense.gate_up.transpose(1, 2), dense.down.transpose(1, 2)
        ids, weights = batch.topk_ids.flatten().long(), batch.topk_weights.flatten()
        bounds = torch.arange(1, experts + 1, device=ids.device)

        def call() -> Tensor:
            ordered, order = ids.sort(stable=True)
            offsets = torch.searchsorted(ordered, bounds).int()
            tokens = order // top_k
            gate, up = grouped_mm(batch.hidden[tokens], gate_up, offs=offsets).chunk(2, -1)
            y = grouped_mm(silu(gate) * up, down, offs=offsets)
            weighted = y * weights[order, None].to(y.dtype)
            return torch.zeros_like(batch.hidden).index_add_(0, tokens, weighted)

        return call
