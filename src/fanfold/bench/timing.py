"""Timing: replays of one CUDA graph that holds several calls; on a CPU, calls one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Call = Callable[[], Tensor]

REPLAYS = 100
WARM_UP = 5  # replays, which also wake the clocks
BUDGET_S = 2.0  # of calls on a CPU, and of replays
FEWEST = 5


@dataclass(frozen=True)
class Times:
    """Microseconds a call: median, lower and upper decile over `replays` replays (of calls, on a CPU)."""

    median_us: float
    p10_us: float
    p90_us: float
    replays: int

    @classmethod
    def of(cls, us: Sequence[float]) -> Times:
        """From one time a replay."""
        low, median, high = torch.tensor(us, dtype=torch.float64).quantile(
            torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        )
        return cls(float(median), float(low), float(high), len(us))


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
        replays = self._number()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(WARM_UP + replays + 1)]
        for event in events[:-1]:
            event.record()
            self._graph.replay()
        events[-1].record()
        torch.cuda.synchronize()
        ms = [start.elapsed_time(end) for start, end in pairwise(events[WARM_UP:])]
        return Times.of([1e3 * each / self._calls for each in ms])

    def _number(self) -> int:
        """How many replays fit the budget."""
        start = time.perf_counter()
        self._graph.replay()
        torch.cuda.synchronize()
        return max(FEWEST, min(REPLAYS, int(BUDGET_S / (time.perf_counter() - start))))


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
