"""Timing: replays of one CUDA graph that holds several calls; eager calls on a GPU; on a CPU, calls one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Call = Callable[[], Tensor]
Mode = Literal["graph", "eager"]

REPLAYS = 100
WARM_UP = 5  # replays, which also wake the clocks
BUDGET_S = 2.0  # of calls on a CPU, and of replays
FEWEST = 5


@dataclass(frozen=True)
class Times:
    """Microseconds a call: median, 20 and 80 % quantiles over `replays` replays, rounds of eager calls, or calls."""

    median_us: float
    p20_us: float
    p80_us: float
    replays: int

    @classmethod
    def of(cls, us: Sequence[float]) -> Times:
        """From one time a replay."""
        low, median, high = torch.tensor(us, dtype=torch.float64).quantile(
            torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        )
        return cls(float(median), float(low), float(high), len(us))


def repeated(turn: Callable[[], None], calls: int) -> Times:
    """Turns of several calls each, one behind the other on the current stream of a GPU, without waits in between."""
    turn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    turn()
    torch.cuda.synchronize()
    turns = max(FEWEST, min(REPLAYS, int(BUDGET_S / (time.perf_counter() - start))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + turns + 1)]
    for event in events[:-1]:
        event.record()
        turn()
    events[-1].record()
    torch.cuda.synchronize()
    ms = [before.elapsed_time(after) for before, after in pairwise(events[WARM_UP:])]
    return Times.of([1e3 * each / calls for each in ms])


def eager_times(calls: Sequence[Call]) -> Times:
    """Eager calls on a GPU, in turn: what takes longer, the host's work for a call or the device's."""

    def turn() -> None:
        for call in calls:
            call()

    return repeated(turn, len(calls))


class Replays:
    """A CUDA graph of several calls.

    Attributes:
        wrong: how many of the calls give other bits in a replay than they gave eagerly.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = len(calls)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            eager = [call() for call in calls]  # compiles
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, stream=stream):
            outputs = [call() for call in calls]
        for output in outputs:
            output.fill_(torch.nan)
        self._graph.replay()
        torch.cuda.synchronize()
        self.wrong = sum(not _same_bits(*pair) for pair in zip(eager, outputs, strict=True))

    def times(self) -> Times:
        """Replays back to back: the device never waits for the host, so launches of graphs cost little."""
        return repeated(self._graph.replay, self._calls)


def call_times(calls: Sequence[Call]) -> Times:
    """Calls one by one on the host's clock, in turn."""
    us: list[float] = []
    calls[0]()
    while len(us) < FEWEST or (sum(us) < 1e6 * BUDGET_S and len(us) < REPLAYS):
        start = time.perf_counter()
        calls[len(us) % len(calls)]()
        us.append(1e6 * (time.perf_counter() - start))
    return Times.of(us)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
