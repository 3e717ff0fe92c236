"""Which implementation runs a job: pure, explainable, needs no GPU."""

from __future__ import annotations

import re
from typing import Literal

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.spec.verdict import Accepted, Rejected, Verdict

Implementation = Literal["auto", "reference"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("auto", "reference")


def arch_name(arch: int | str) -> str:
    """`cpu` or `sm_NN`, from 90, "90", "sm_90" or "cpu".

    Raises:
        ArgumentError: none of these.
    """
    match = re.fullmatch(r"(?:sm_?)?(\d{2,3})", str(arch).lower())
    if match is None and str(arch).lower() != "cpu":
        raise ArgumentError(
            "arch",
            found=repr(arch),
            expected='"cpu" or a compute capability such as 90',
            next_step="Pass 90 for an H200.",
        )
    return f"sm_{match[1]}" if match else "cpu"


def verdicts(arch: str, implementation: str = "auto") -> list[Verdict]:
    """Every implementation of the expert layer with its verdict, the chosen one first.

    Args:
        arch: `cpu` or `sm_NN`.
        implementation: `auto`, or the one asked for.

    Raises:
        ArgumentError: no implementation has that name.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            "implementation",
            found=repr(implementation),
            expected=f"one of {', '.join(IMPLEMENTATIONS)}",
            next_step='Leave it at "auto".',
        )
    if arch == "cpu" or implementation == "reference":
        return [Accepted("reference")]
    return [
        Rejected(
            "reference",
            f'on {arch} the reference is a check, not an engine: ask for it with implementation="reference"',
        )
    ]


def choose(arch: str, implementation: str = "auto") -> str:
    """The name of the implementation that runs.

    Raises:
        ArgumentError: no implementation has that name.
        UnavailableError: none takes the job.
    """
    found = verdicts(arch, implementation)
    accepted = [verdict.kernel for verdict in found if isinstance(verdict, Accepted)]
    if not accepted:
        raise UnavailableError(
            f"expert layer on {arch}",
            found="; ".join(f"{v.kernel}: {v.reason}" for v in found if isinstance(v, Rejected)),
            expected="an implementation for this device",
            next_step='Pass implementation="reference" to run the readable torch version there, or use device="cpu".',
        )
    return accepted[0]
