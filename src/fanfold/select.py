"""Which implementation runs a job: pure, explainable, needs no GPU."""

from __future__ import annotations

import re

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.kernels.grouped.sm90.supported import refusal
from fanfold.spec.job import LayerJob
from fanfold.spec.verdict import Accepted, Rejected, Verdict

IMPLEMENTATIONS = ("auto", "reference", "grouped", "grouped_int4_sm90")
OLDEST = 80
"""The first compute capability that the kernels are compiled for."""


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


def verdicts(job: LayerJob, arch: str, implementation: str = "auto") -> list[Verdict]:
    """Every implementation of the expert layer with its verdict, by preference: the first accepted one runs.

    Args:
        job: the layer.
        arch: `cpu` or `sm_NN`.
        implementation: `auto`, or the one asked for.

    Raises:
        ArgumentError: no implementation has that name.
    """
    _check_name(implementation)
    reasons = {
        "grouped_int4_sm90": _int4_sm90(job, arch),
        "grouped": _grouped(arch),
        "reference": None if arch == "cpu" or implementation == "reference" else _reference(arch),
    }
    if implementation != "auto":
        for name in reasons.keys() - {implementation}:
            reasons[name] = f"{implementation} was asked for"
    return [Accepted(name) if reason is None else Rejected(name, reason) for name, reason in reasons.items()]


def choose(job: LayerJob, arch: str, implementation: str = "auto") -> str:
    """The name of the implementation that runs.

    Raises:
        ArgumentError: no implementation has that name.
        UnavailableError: none takes the job.
    """
    found = verdicts(job, arch, implementation)
    accepted = [verdict.kernel for verdict in found if isinstance(verdict, Accepted)]
    if not accepted:
        raise _unavailable(arch, "; ".join(f"{v.kernel}: {v.reason}" for v in found if isinstance(v, Rejected)))
    return accepted[0]


def check(arch: str, implementation: str) -> None:
    """Whether any layer runs so, asked before a checkpoint is read.

    Raises:
        ArgumentError: no implementation has that name.
        UnavailableError: it runs nothing on this device.
    """
    _check_name(implementation)
    reasons = {"grouped_int4_sm90": _hopper(arch), "grouped": _grouped(arch), "reference": None}
    if implementation == "auto":
        implementation = "reference" if arch == "cpu" else "grouped"
    reason = reasons[implementation]
    if reason is not None:
        raise _unavailable(arch, f"{implementation}: {reason}")


def _check_name(implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            "implementation",
            found=repr(implementation),
            expected=f"one of {', '.join(IMPLEMENTATIONS)}",
            next_step='Leave it at "auto".',
        )


def _unavailable(arch: str, found: str) -> UnavailableError:
    return UnavailableError(
        f"expert layer on {arch}",
        found=found,
        expected="an implementation for this device",
        next_step='Pass implementation="reference" to run the readable torch version there, or use device="cpu".',
    )


def _grouped(arch: str) -> str | None:
    if arch == "cpu":
        return "needs an NVIDIA GPU"
    return None if int(arch[3:]) >= OLDEST else f"needs compute capability {OLDEST / 10} or later, not {arch}"


def _hopper(arch: str) -> str | None:
    return None if arch == "sm_90" else "needs a Hopper GPU (sm_90)"


def _int4_sm90(job: LayerJob, arch: str) -> str | None:
    reason, shape = _hopper(arch), job.shape
    if reason is not None:
        return reason
    if not shape.gated:
        return f"{job.activation}: runs gated activations"
    gate_up = refusal(job.gate_up, shape.halves, shape.intermediate, shape.hidden, job.dtype)
    down = refusal(job.down, 1, shape.hidden, shape.intermediate, job.dtype)
    return f"gate_up: {gate_up}" if gate_up else f"down: {down}" if down else None


def _reference(arch: str) -> str:
    return f'on {arch} the reference is a check, not an engine: ask for it with implementation="reference"'
