"""Figures: every cell is checked at the size that is timed, and has no time where the check fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any, cast

import torch

from fanfold.bench.adapters import adapter_ids, layer_pairs, pair_bytes, pair_flops, random_pairs
from fanfold.bench.batches import Batch, experts_met, load, pairs_met, random_batch
from fanfold.bench.cell import Cell, Settings
from fanfold.bench.checking import Expected
from fanfold.bench.jobs import LayerShape
from fanfold.bench.peers import DenseExperts, Peer, dense_experts, refusal
from fanfold.bench.race import of_peer, own, race, without_times
from fanfold.bench.weights import random_experts
from fanfold.errors import UnavailableError, UnsupportedError
from fanfold.explanation import explain
from fanfold.layers.experts import Experts, arch_of
from fanfold.layers.reference import LayerPairs
from fanfold.lora.convert import convert
from fanfold.lora.site import ExpertPairs
from fanfold.spec.arch import ARCHS
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights

Progress = Callable[[int, int, str], None]

BETWEEN_BYTES = 200e6
"""What other calls read, at least, before a weight is read again: several times the L2 of any GPU so far."""
COPIES = range(3, 17)
CALLS = 6
"""Calls of a graph, at least; each has a routing of its own."""


@dataclass(frozen=True)
class Loaded:
    """Layers of unlike weights and adapters, what the first is made of, and the same weights for peers."""

    layers: list[Experts]
    weights: ExpertWeights
    pairs: LayerPairs
    dense: list[DenseExperts]


def bench(
    shapes: Sequence[LayerShape],
    formats: Sequence[WeightFormat],
    tokens: Sequence[int],
    settings: Settings,
    progress: Progress | None = None,
    peers: Sequence[Peer] = (),
) -> Iterator[Cell]:
    """Times a layer of every shape, in every format, for every number of tokens.

    On a GPU a call is timed inside a CUDA graph of several calls over copies of the weights, so that no weight is in
    L2 when it is read, and with a routing each; or as one of as many eager calls. On a CPU, calls are timed one by one.

    Args:
        shapes: the layers.
        formats: of their weights.
        tokens: of a call.
        settings: device, routing, implementation, dtype, seed, adapters, graph, eager or compiled calls.
        progress: called with (done, total, what).
        peers: other libraries' layers, on the same batches and weights, dense; their turns and fanfold's rotate.

    Yields:
        The cells, each as soon as it is done. One that can't run says so in `refused`.

    Raises:
        ArgumentError: no implementation has that name, or a recorded routing is of another model.
    """
    total, done = len(shapes) * len(formats) * len(tokens), 0
    for shape in shapes:
        for fmt in formats:
            cells = _cells(shape, fmt, tokens, settings, peers)
            for count in tokens:
                if progress is not None:
                    progress(done, total, f"{shape.name} {fmt} {count} tokens")
                yield next(cells)
                done += 1


def _cells(
    shape: LayerShape, fmt: WeightFormat, tokens: Sequence[int], settings: Settings, peers: Sequence[Peer]
) -> Iterator[Cell]:
    """The cells that share their weights."""
    empty = [Cell(shape, fmt, count, settings) for count in tokens]
    try:
        loaded = _load(shape, fmt, min(tokens), settings, bool(peers))
    except (UnavailableError, UnsupportedError) as error:
        yield from (replace(cell, refused=str(error)) for cell in empty)
        return
    for cell in empty:
        try:
            yield _measured(cell, loaded, peers)
        except (UnavailableError, UnsupportedError) as error:
            yield replace(cell, refused=str(error))


def _load(shape: LayerShape, fmt: WeightFormat, tokens: int, settings: Settings, dense: bool) -> Loaded:
    """Layers enough for calls of so few tokens."""
    copies = copies_needed(shape, fmt, tokens) if settings.device.type == "cuda" else 1
    first = random_experts(shape, fmt, settings.device, settings.seed)
    others = (random_experts(shape, fmt, settings.device, settings.seed + copy) for copy in range(1, copies))
    loaded = Loaded([], first, {}, [])
    for number, weights in enumerate(chain([first], others)):
        experts = Experts(weights, shape.activation, dtype=settings.dtype, implementation=settings.implementation)
        loaded.layers.append(experts)
        if dense and refusal(shape, settings.adapters) is None:
            loaded.dense.append(dense_experts(shape, weights, settings.dtype))
        if settings.adapters:
            seeds = (settings.seed + settings.adapters * number + slot for slot in range(settings.adapters))
            made = [random_pairs(shape, settings.rank, settings.dtype, settings.device, seed) for seed in seeds]
            experts.reserve(settings.adapters, settings.rank)
            for slot, pairs in enumerate(made):
                experts.put(slot, cast("ExpertPairs", convert(pairs, experts)))
            if number == 0:
                loaded = replace(loaded, pairs=layer_pairs(made))
    return loaded


def copies_needed(shape: LayerShape, fmt: WeightFormat, tokens: int) -> int:
    """Copies of the weights that calls of so many tokens take in turn, so that none is read from a cache."""
    least: int = explain(shape.experts, fmt, "cpu", tokens * shape.top_k)["weight_bytes"]
    return min(max(math.ceil(BETWEEN_BYTES / least) + 1, COPIES[0]), COPIES[-1])


@torch.inference_mode()
def _measured(cell: Cell, loaded: Loaded, peers: Sequence[Peer]) -> Cell:
    settings, layers, copies = cell.settings, loaded.layers, len(loaded.layers)
    number = copies * math.ceil(CALLS / copies)
    batches = [_batch(cell, settings.seed + call) for call in range(number)]
    expected = Expected(loaded.weights, batches[0], cell.shape.activation, loaded.pairs)
    runner = own(layers, batches, expected, settings)
    cell = replace(
        cell,
        implementation=layers[0].implementation,
        copies=copies,
        calls=number,
        check=runner.check,
        **work(cell, batches),
    )
    if runner.wrong is not None:
        return replace(cell, refused=runner.wrong)
    reason = refusal(cell.shape, settings.adapters)
    if reason is not None:
        return replace(cell, times=race(runner, [])[0], peers=without_times(peers, reason))
    others = [(peer.name, of_peer(peer, loaded.dense, batches, expected, settings)) for peer in peers]
    times, figures = race(runner, others)
    return replace(cell, times=times, peers=figures)


def _batch(cell: Cell, seed: int) -> Batch:
    settings = cell.settings
    ids = adapter_ids(settings.popularity, cell.tokens, settings.adapters, seed) if settings.adapters else None
    return random_batch(cell.shape, cell.tokens, settings.routing, settings.dtype, settings.device, seed, ids)


def work(cell: Cell, batches: Sequence[Batch]) -> dict[str, Any]:
    """What a call has to read and to compute, the mean over the batches."""
    shape, settings, arch = cell.shape, cell.settings, arch_of(cell.settings.device)
    rows = cell.tokens * shape.top_k
    met = [len(experts_met(batch)) for batch in batches]
    answers = [explain(replace(shape.experts, num_experts=count), cell.format, arch, rows) for count in met]
    weights = [int(answer["weight_bytes"]) for answer in answers]
    adapters = [pairs_met(batch) * pair_bytes(shape, settings.rank, settings.dtype) for batch in batches]
    changed = rows if settings.adapters and settings.popularity != "none" else 0
    flops = int(answers[0]["flops"]) + changed * pair_flops(shape, settings.rank)
    floor = None
    rates = ARCHS.get(arch)
    if rates is not None and rates.name in torch.cuda.get_device_name(settings.device):  # others have other rates
        reads = fmean(
            max((a + b) / rates.read_bytes, flops / rates.matrix_flops) for a, b in zip(weights, adapters, strict=True)
        )
        floor = reads * 1e6
    return {
        "experts_met": fmean(met),
        "load": fmean(load(batch, shape.experts.num_experts) for batch in batches),
        "weight_bytes": fmean(weights),
        "adapter_bytes": fmean(adapters),
        "flops": flops,
        "floor_us": floor,
    }
