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
Mode = Literal["graph", "eager", "compiled"]

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


def rotated(turns: Sequence[Callable[[], None]], calls: int) -> list[Times]:
    """Turns of several calls each, one behind the other on the current stream of a GPU, without waits in between.

    Args:
        turns: of one or several rivals; each round starts with another of them.
        calls: of a turn.

    Returns:
        The times of a call, a rival.
    """
    for turn in turns:
        turn()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for turn in turns:
        turn()
    torch.cuda.synchronize()
    budget = BUDGET_S * len(turns)
    rounds = WARM_UP + max(FEWEST, min(REPLAYS, int(budget / (time.perf_counter() - start))))
    order = [rival for one in range(rounds) for rival in in_turn(len(turns), one)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(order) + 1)]
    for event, rival in zip(events, order, strict=False):
        event.record()
        turns[rival]()
    events[-1].record()
    torch.cuda.synchronize()
    us: list[list[float]] = [[] for _ in turns]
    for rival, (before, after) in zip(order, pairwise(events), strict=True):
        us[rival].append(1e3 * before.elapsed_time(after) / calls)
    return [Times.of(each[WARM_UP:]) for each in us]


def in_turn(rivals: int, round_number: int) -> list[int]:
    """The order of a round, which starts one later than the last."""
    return [(place + round_number) % rivals for place in range(rivals)]


def all_of(calls: Sequence[Call]) -> Callable[[], None]:
    """A turn of calls."""

    def turn() -> None:
        for call in calls:
            call()

    return turn


class Replays:
    """A CUDA graph of several calls.

    Attributes:
        wrong: how many of the calls give other bits in a replay than they gave eagerly.
        outputs: of a replay, call by call.
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
            self.outputs = [call() for call in calls]
        for output in self.outputs:
            output.fill_(torch.nan)
        self._graph.replay()
        torch.cuda.synchronize()
        self.wrong = sum(not same_bits(*pair) for pair in zip(eager, self.outputs, strict=True))

    def replay(self) -> None:
        """A turn; replays back to back never let the device wait for the host, so launches of graphs cost little."""
        self._graph.replay()

    def times(self) -> Times:
        """Those of this graph alone."""
        return rotated([self.replay], self._calls)[0]


def call_times(rivals: Sequence[Sequence[Call]]) -> list[Times]:
    """Calls one by one on the host's clock, in turn, the rivals' rotated as by `rotated`."""
    us: list[list[float]] = [[] for _ in rivals]
    for calls in rivals:
        calls[0]()
    budget = 1e6 * BUDGET_S * len(rivals)
    while len(us[0]) < FEWEST or (sum(map(sum, us)) < budget and len(us[0]) < REPLAYS):
        one = len(us[0])
        for rival in in_turn(len(rivals), one):
            start = time.perf_counter()
            rivals[rival][one % len(rivals[rival])]()
            us[rival].append(1e6 * (time.perf_counter() - start))
    return [Times.of(each) for each in us]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
