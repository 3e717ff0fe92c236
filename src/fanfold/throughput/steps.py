"""Steps: prefill and decode on a clock, eager and as a CUDA graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fanfold.integrations.transformers.forward import FixedCache, Forward, ModelForward

WARM_UP = 2
"""Decode steps before those that are timed."""
CHECKED = 2
"""Steps whose logits are compared: the second reads what the first has put in the cache."""
SAME = 0.01
"""Most relative difference of a replay's logits from an eager step's: other algorithms may add in another order."""


def prefill(forward: Forward, ids: Tensor) -> tuple[float, Tensor, Any]:
    """Seconds, the next tokens [B, 1] and the cache."""
    start = now(ids.device)
    logits, cache = forward.prompt(ids, 1)
    token = logits[:, -1:].argmax(-1)
    return now(ids.device) - start, token, cache


def decode(forward: Forward, token: Tensor, cache: Any, new: int) -> list[float]:
    """Seconds of each step behind the first ones."""
    seconds: list[float] = []
    for _ in range(WARM_UP + new):
        start = now(token.device)
        token = forward.step(token, cache).argmax(-1, keepdim=True)
        seconds.append(now(token.device) - start)
    return seconds[WARM_UP:]


@dataclass(frozen=True)
class Graphed:
    """Decode steps that were replayed: seconds of each, and the most relative difference of their first logits."""

    seconds: list[float]
    difference: float


class Step:
    """A decode step that reads its tokens and its place where it left them the time before.

    Args:
        forward: a model.
        ids: the prompt [B, S].
        room: tokens a row that fit in the cache.
    """

    def __init__(self, forward: ModelForward, ids: Tensor, room: int) -> None:
        self._forward = forward
        self._prompt = ids.shape[1]
        logits, self._fixed = forward.fixed(ids, room)
        self._first = logits.argmax(-1, keepdim=True)
        self.token = self._first.clone()

    @property
    def fixed(self) -> FixedCache:
        """The cache."""
        return self._fixed

    def __call__(self) -> Tensor:
        """Logits [B, V]."""
        logits = self._forward.step(self.token, self._fixed.cache)
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        self._fixed.rewind(self._prompt)
        self.token.copy_(self._first)


def graphed_decode(forward: ModelForward, ids: Tensor, new: int) -> Graphed:
    """Decode steps as replays of one CUDA graph, compared with eager ones first.

    Raises:
        RuntimeError: torch can't capture the step, e.g. as it waits for the device.
    """
    step = Step(forward, ids, ids.shape[1] + WARM_UP + new)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step.rewind()
        eager = [step().clone() for _ in range(CHECKED)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = step()
    return replayed(step, graph.replay, logits, eager, new)


def replayed(step: Step, replay: Callable[[], None], logits: Tensor, eager: list[Tensor], new: int) -> Graphed:
    """Replays from the end of the prompt on: compared, then timed.

    Args:
        step: rewound first.
        replay: one step.
        logits: where it puts them.
        eager: what they should be, step by step.
        new: steps to time.
    """
    device = logits.device
    step.rewind()
    difference = 0.0
    for expected in eager:
        logits.fill_(torch.nan)
        replay()
        difference = max(difference, float(apart(logits, expected).max()))
    step.rewind()
    seconds: list[float] = []
    for _ in range(WARM_UP + new):
        start = now(device)
        replay()
        seconds.append(now(device) - start)
    return Graphed(seconds[WARM_UP:], difference)


def apart(found: Tensor, expected: Tensor) -> Tensor:
    """Relative difference of each row of logits [..., V]; NaN is infinite."""
    expected = expected.float()
    off = cast("Tensor", (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1))
    return off.nan_to_num(nan=torch.inf)


def now(device: torch.device) -> float:
    """The host's clock, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
