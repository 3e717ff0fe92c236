"""Search: uphill, one field at a time, from where a layer stands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)
GAIN = 0.02
"""A candidate has to be faster by this part: less is noise."""


@dataclass(frozen=True)
class Found(Generic[C]):
    """What a search came to.

    Attributes:
        best: the fastest.
        us: its time.
        start_us: that of where the search began.
        trials: candidates that were measured.
        whole: whether it ended by itself, no neighbour of the best being faster; else the trials ran out.
    """

    best: C
    us: float
    start_us: float
    trials: int
    whole: bool


def climb(
    start: C,
    neighbours: Callable[[C], Sequence[C]],
    measure: Callable[[C], float | None],
    trials: int,
) -> Found[C] | None:
    """The fastest that steps of one field lead to.

    Goes to a neighbour as soon as it is faster by `GAIN`, and ends where none is. Nothing is measured twice.

    Args:
        start: the first candidate.
        neighbours: those that differ by one step, in a fixed order.
        measure: microseconds; None: the candidate does not run, or is wrong.
        trials: most that are measured.

    Returns:
        None where the start itself does not run.
    """
    first = measure(start)
    if first is None:
        return None
    best, us = start, first
    seen = {start}
    waiting = list(neighbours(start))
    while waiting and len(seen) < trials:
        candidate = waiting.pop(0)
        if candidate in seen:
            continue
        seen.add(candidate)
        found = measure(candidate)
        if found is not None and found < us * (1 - GAIN):
            best, us = candidate, found
            waiting = list(neighbours(best))
    return Found(best, us, first, len(seen), not any(candidate not in seen for candidate in waiting))
