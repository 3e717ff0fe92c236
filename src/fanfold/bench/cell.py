"""Cell: one figure, with all that it depends on."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from fanfold.bench.adapters import Popularity
from fanfold.bench.batches import Routing
from fanfold.bench.checking import Check
from fanfold.bench.jobs import LayerShape
from fanfold.bench.machine import machine
from fanfold.bench.peers import PeerFigure
from fanfold.bench.recorded import Recorded
from fanfold.bench.timing import Mode, Times
from fanfold.spec.weight_format import WeightFormat

SCHEMA = 3
"""Of a row; benchmarks/README.md tells them all."""


@dataclass(frozen=True)
class Settings:
    """What all cells of a run share."""

    device: torch.device
    routing: Routing | Recorded = "uniform"
    implementation: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    adapters: int = 0
    rank: int = 16
    popularity: Popularity = "uniform"
    mode: Mode = "graph"

    @property
    def timing(self) -> str:
        """What a time is of."""
        if self.mode == "compiled":
            return "compiled calls"
        if self.device.type == "cpu":
            return "calls"
        return "graph replays" if self.mode == "graph" else "eager calls"


@dataclass(frozen=True)
class Cell:
    """One figure, or why there is none.

    Attributes:
        shape: the layer.
        format: of gate_up and down.
        tokens: of a call.
        settings: of the run.
        implementation: what ran.
        copies: of the weights, which calls take in turn.
        calls: in a graph, each with another routing.
        experts_met: by a call, the mean.
        load: the most rows of an expert over the mean of all experts, the mean over the calls.
        weight_bytes: packed bytes of these experts.
        adapter_bytes: of the (adapter, expert) pairs met by a call, the mean.
        flops: multiplications and additions of the products of a call, those of adapters with them.
        floor_us: the least time a call can take; None where the device's rates are not known.
        check: None where nothing ran.
        times: None where the check failed.
        peers: others on the same batches, in the same run; empty where none was asked for.
        refused: why there are no times.
    """

    shape: LayerShape
    format: WeightFormat
    tokens: int
    settings: Settings
    implementation: str | None = None
    copies: int = 0
    calls: int = 0
    experts_met: float | None = None
    load: float | None = None
    weight_bytes: float | None = None
    adapter_bytes: float | None = None
    flops: int | None = None
    floor_us: float | None = None
    check: Check | None = None
    times: Times | None = None
    peers: tuple[PeerFigure, ...] = ()
    refused: str | None = None

    def row(self) -> dict[str, Any]:
        """All of it by name, with the machine; what is not known is None."""
        sizes, settings = self.shape.experts, self.settings
        us = None if self.times is None else self.times.median_us
        read = (self.weight_bytes or 0) + (self.adapter_bytes or 0)
        return {
            "schema": SCHEMA,
            "shape": self.shape.name,
            "experts": sizes.num_experts,
            "top_k": self.shape.top_k,
            "hidden": sizes.hidden,
            "intermediate": sizes.intermediate,
            "activation": self.shape.activation.kind,
            "bias": self.shape.bias,
            "format": self.format.name,
            "tokens": self.tokens,
            "routing": str(settings.routing),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "seed": settings.seed,
            "adapters": settings.adapters,
            "rank": settings.rank if settings.adapters else None,
            "popularity": settings.popularity if settings.adapters else None,
            "device": settings.device.type,
            "implementation": self.implementation,
            "timing": settings.timing,
            "copies": self.copies,
            "calls": self.calls,
            **_values(Times, self.times),
            "floor_us": self.floor_us,
            "over_floor": None if us is None or self.floor_us is None else us / self.floor_us,
            "experts_met": self.experts_met,
            "load": self.load,
            "weight_bytes": self.weight_bytes,
            "adapter_bytes": self.adapter_bytes,
            "flops": self.flops,
            "gigabytes_per_second": None if us is None else read / us / 1e3,
            "teraflops": None if us is None or self.flops is None else self.flops / us / 1e6,
            **_values(Check, self.check),
            "peers": [peer.row(us) for peer in self.peers],
            "refused": self.refused,
            **machine(settings.device),
        }


def _values(kind: type[Check] | type[Times], found: Check | Times | None) -> dict[str, Any]:
    return dict.fromkeys(field.name for field in fields(kind)) if found is None else asdict(found)
