"""Levels: how loads, and changes of them, are drawn: in few steps that an eye can tell apart."""

from __future__ import annotations

from bisect import bisect_right

LEVELS = (0.25, 0.5, 0.75, 1.25, 2.0, 4.0)
"""Loads over the mean at which the next level begins; level 0 is an expert without a row."""
CHANGES = (-1.0, -0.5, -0.25, -0.1, 0.1, 0.25, 0.5, 1.0)
"""Changes of a load, in means, at which the next level begins; the middle one is next to no change."""


def relative_load(counts: list[int]) -> list[float]:
    """Rows of each expert over the mean."""
    mean = sum(counts) / len(counts)
    return [count / mean for count in counts]


def level_of(load: float) -> int:
    """0 to 7."""
    return 1 + bisect_right(LEVELS, load) if load > 0 else 0


def change_of(difference: float) -> int:
    """0 to 8."""
    return bisect_right(CHANGES, difference)
