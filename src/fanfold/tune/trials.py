"""Trials: a layer of random weights, run with one candidate after the other; verified, then timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fanfold.bench.batches import Batch, random_batch
from fanfold.bench.checking import Check, Expected, dirty_memory
from fanfold.bench.jobs import LayerShape
from fanfold.bench.run import CALLS, copies_needed
from fanfold.bench.timing import Call, Replays
from fanfold.bench.weights import random_experts
from fanfold.layers.implementations import Implementation, implement
from fanfold.spec.activation_format import PLAIN
from fanfold.spec.weight_format import WeightFormat
from fanfold.tune.candidates import Candidate
from fanfold.tune.journal import Outcome

Clock = Callable[[Sequence[Call]], Outcome]


def replays(calls: Sequence[Call]) -> Outcome:
    """The median of replays of a CUDA graph that holds the calls."""
    found = Replays(calls)
    if found.wrong:
        return Outcome(None, f"wrong: {found.wrong} of {len(calls)} calls differ in a replay of their graph")
    return Outcome(found.times().median_us)


class Trials:
    """One layer and number of tokens.

    Args:
        shape: the layer.
        fmt: of its weights.
        tokens: T.
        implementation: what runs it.
        device: where.
        dtype: of the activations.
        clock: how calls are timed.
    """

    def __init__(
        self,
        shape: LayerShape,
        fmt: WeightFormat,
        tokens: int,
        implementation: str,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        clock: Clock = replays,
    ) -> None:
        copies = copies_needed(shape, fmt, tokens) if device.type == "cuda" else 1
        self._layers: list[Implementation] = []
        calls = copies * math.ceil(CALLS / copies)
        self._batches = [random_batch(shape, tokens, "uniform", dtype, device, seed) for seed in range(calls)]
        for seed in range(copies):
            weights = random_experts(shape, fmt, device, seed)
            if seed == 0:
                self._expected = Expected(weights, self._batches[0], shape.activation)
            self._layers.append(implement(implementation, weights, shape.activation, False, PLAIN))
        self._first: Tensor | None = None
        self._clock = clock

    @torch.inference_mode()
    def measure(self, candidate: Candidate) -> Outcome:
        """A candidate's time; the first one's outputs are what the others' are compared with beside fp32."""
        for layer in self._layers:
            host: Any = layer
            host.forced = candidate.forced
        try:
            dirty_memory(self._batches[0].hidden.device)
            output = _call(self._layers[0], self._batches[0])
            wrong = self._wrong(output)
            if wrong is not None:
                return Outcome(None, f"wrong: {wrong}")
            batches = enumerate(self._batches)
            calls = [partial(_call, self._layers[n % len(self._layers)], batch) for n, batch in batches]
            return self._clock(calls)
        except Exception as error:  # Triton, its compilers and the driver raise many unlike classes
            return Outcome(None, f"{type(error).__name__}: {error}".partition("\n")[0])

    def _wrong(self, output: Tensor) -> str | None:
        """Why the output is wrong: some tokens against fp32, all against the first candidate's."""
        check = self._expected.check(output)
        if check.wrong is not None:
            return check.wrong
        if self._first is None:
            self._first = output.clone()
        return unlike(output, self._first, check)


def unlike(output: Tensor, first: Tensor, check: Check) -> str | None:
    """Why an output is not as near to the first one as two right ones are."""
    off, expected = output.double() - first.double(), first.double()
    norm = float(expected.square().sum().sqrt())
    error = float(off.square().sum().sqrt()) / norm
    largest = float(off.abs().max()) * expected.numel() ** 0.5 / norm
    limits = {
        "relative difference": (error, 2 * check.plain_error),
        "one value differs by": (largest, 8 * check.plain_largest),  # the largest of many more values
    }
    words = [f"{name} {value:.1e}, limit {limit:.1e}" for name, (value, limit) in limits.items() if not value < limit]
    return "; ".join(words) or None


def _call(layer: Implementation, batch: Batch) -> Tensor:
    return layer.run(batch.hidden, batch.topk_ids, batch.topk_weights, None)
