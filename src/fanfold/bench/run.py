"""Figures: every cell is checked at the size that is timed, and has no time where the check fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fanfold.bench.batches import Batch, Routing, experts_met, random_batch
from fanfold.bench.checking import Check, check
from fanfold.bench.jobs import LayerShape
from fanfold.bench.machine import machine
from fanfold.bench.timing import Replays, Times, call_times
from fanfold.bench.weights import random_experts
from fanfold.errors import UnavailableError, UnsupportedError
from fanfold.explanation import explain
from fanfold.layers.experts import Experts, arch_of
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights

Progress = Callable[[int, int, str], None]

BETWEEN_BYTES = 200e6
"""What other calls read, at least, before a weight is read again: several times the L2 of any GPU so far."""
COPIES = range(3, 17)
CALLS = 6
"""Calls of a graph, at least; each has a routing of its own."""


@dataclass(frozen=True)
class Settings:
    """What all cells of a run share."""

    device: torch.device
    routing: Routing = "uniform"
    implementation: str = "auto"
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0


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
        weight_bytes: packed bytes of these experts.
        flops: multiplications and additions of the products of a call.
        floor_us: the least time a call can take; None where the device's rates are not known.
        check: None where nothing ran.
        times: None where the check failed.
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
    weight_bytes: float | None = None
    flops: int | None = None
    floor_us: float | None = None
    check: Check | None = None
    times: Times | None = None
    refused: str | None = None

    def row(self) -> dict[str, Any]:
        """All of it by name, with the machine; what is not known is None."""
        sizes, settings = self.shape.experts, self.settings
        us = None if self.times is None else self.times.median_us
        return {
            "shape": self.shape.name,
            "experts": sizes.num_experts,
            "top_k": self.shape.top_k,
            "hidden": sizes.hidden,
            "intermediate": sizes.intermediate,
            "activation": self.shape.activation.kind,
            "bias": self.shape.bias,
            "format": self.format.name,
            "tokens": self.tokens,
            "routing": settings.routing,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "seed": settings.seed,
            "device": settings.device.type,
            "implementation": self.implementation,
            "timing": "graph replays" if settings.device.type == "cuda" else "calls",
            "copies": self.copies,
            "calls": self.calls,
            **_values(Times, self.times),
            "floor_us": self.floor_us,
            "over_floor": None if us is None or self.floor_us is None else us / self.floor_us,
            "experts_met": self.experts_met,
            "weight_bytes": self.weight_bytes,
            "flops": self.flops,
            "gigabytes_per_second": None if us is None or self.weight_bytes is None else self.weight_bytes / us / 1e3,
            "teraflops": None if us is None or self.flops is None else self.flops / us / 1e6,
            **_values(Check, self.check),
            "refused": self.refused,
            **machine(settings.device),
        }


def bench(
    shapes: Sequence[LayerShape],
    formats: Sequence[WeightFormat],
    tokens: Sequence[int],
    settings: Settings,
    progress: Progress | None = None,
) -> Iterator[Cell]:
    """Times a layer of every shape, in every format, for every number of tokens.

    On a GPU a call is timed inside a CUDA graph of several calls over copies of the weights, so that no weight is in
    L2 when it is read, and with a routing each. On a CPU, calls are timed one by one.

    Args:
        shapes: the layers.
        formats: of their weights.
        tokens: of a call.
        settings: device, routing, implementation, dtype, seed.
        progress: called with (done, total, what).

    Yields:
        The cells, each as soon as it is done. One that can't run says so in `refused`.

    Raises:
        ArgumentError: no implementation has that name.
    """
    total, done = len(shapes) * len(formats) * len(tokens), 0
    for shape in shapes:
        for fmt in formats:
            cells = _cells(shape, fmt, tokens, settings)
            for count in tokens:
                if progress is not None:
                    progress(done, total, f"{shape.name} {fmt} {count} tokens")
                yield next(cells)
                done += 1


def _cells(shape: LayerShape, fmt: WeightFormat, tokens: Sequence[int], settings: Settings) -> Iterator[Cell]:
    """The cells that share their weights."""
    empty = [Cell(shape, fmt, count, settings) for count in tokens]
    try:
        weights, layers = _layers(shape, fmt, min(tokens), settings)
    except (UnavailableError, UnsupportedError) as error:
        yield from (replace(cell, refused=str(error)) for cell in empty)
        return
    for cell in empty:
        try:
            yield _measured(cell, weights, layers)
        except (UnavailableError, UnsupportedError) as error:
            yield replace(cell, refused=str(error))


def _layers(
    shape: LayerShape, fmt: WeightFormat, tokens: int, settings: Settings
) -> tuple[ExpertWeights, list[Experts]]:
    """Layers of unlike weights, enough of them for the fewest tokens, and the weights of the first."""
    copies = copies_needed(shape, fmt, tokens) if settings.device.type == "cuda" else 1

    def build(weights: ExpertWeights) -> Experts:
        return Experts(weights, shape.activation, dtype=settings.dtype, implementation=settings.implementation)

    first = random_experts(shape, fmt, settings.device, settings.seed)
    others = (random_experts(shape, fmt, settings.device, settings.seed + copy) for copy in range(1, copies))
    return first, [build(first), *map(build, others)]


def copies_needed(shape: LayerShape, fmt: WeightFormat, tokens: int) -> int:
    """Copies of the weights that calls of so many tokens take in turn, so that none is read from a cache."""
    least: int = explain(shape.experts, fmt, "cpu", tokens * shape.top_k)["weight_bytes"]
    return min(max(math.ceil(BETWEEN_BYTES / least) + 1, COPIES[0]), COPIES[-1])


@torch.inference_mode()
def _measured(cell: Cell, weights: ExpertWeights, layers: Sequence[Experts]) -> Cell:
    shape, settings, copies = cell.shape, cell.settings, len(layers)
    number = copies * math.ceil(CALLS / copies)
    batches = [
        random_batch(shape, cell.tokens, settings.routing, settings.dtype, settings.device, settings.seed + call)
        for call in range(number)
    ]
    found = check(layers[0], weights, batches[0])
    cell = replace(
        cell,
        implementation=layers[0].implementation,
        copies=copies,
        calls=number,
        check=found,
        **work(cell, batches),
    )
    if found.wrong is not None:
        return replace(cell, refused=f"wrong: {found.wrong}")
    calls = [partial(_call, layers[index % copies], batch) for index, batch in enumerate(batches)]
    if settings.device.type == "cpu":
        return replace(cell, times=call_times(calls))
    replays = Replays(calls)
    if replays.wrong:
        return replace(cell, refused=f"wrong: {replays.wrong} of {number} calls differ in a replay of their graph")
    return replace(cell, times=replays.times())


def _call(experts: Experts, batch: Batch) -> Tensor:
    return experts(batch.hidden, batch.topk_ids, batch.topk_weights)


def work(cell: Cell, batches: Sequence[Batch]) -> dict[str, Any]:
    """What a call has to read and to compute, the mean over the batches."""
    met = [len(experts_met(batch)) for batch in batches]
    device = cell.settings.device
    answers = [
        explain(
            replace(cell.shape.experts, num_experts=count),
            cell.format,
            arch_of(device),
            cell.tokens * cell.shape.top_k,
        )
        for count in met
    ]
    floors = [answer["floor_us"] for answer in answers]
    rates: str | None = answers[0]["floor_of"]
    known = rates is not None and rates in torch.cuda.get_device_name(device)  # an arch has GPUs of unlike rates
    return {
        "experts_met": fmean(met),
        "weight_bytes": fmean(answer["weight_bytes"] for answer in answers),
        "flops": answers[0]["flops"],
        "floor_us": fmean(floors) if known else None,
    }


def _values(kind: type[Check] | type[Times], found: Check | Times | None) -> dict[str, Any]:
    return dict.fromkeys(field.name for field in fields(kind)) if found is None else asdict(found)
