"""Verdict: whether a kernel takes a job, and why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accepted:
    """The kernel runs the job."""

    kernel: str


@dataclass(frozen=True)
class Rejected:
    """The kernel does not run the job, for this reason."""

    kernel: str
    reason: str


Verdict = Accepted | Rejected
