"""tune: the fastest configs of layers on this GPU, one field at a time, into the user's tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from fanfold.bench.jobs import LayerShape
from fanfold.bench.machine import device_named, machine
from fanfold.errors import UnavailableError
from fanfold.kernels.common.tables import user_folder, user_table
from fanfold.kernels.grouped.sm90.tuned import KERNEL as SM90
from fanfold.layers.experts import arch_of
from fanfold.spec.weight_format import WeightFormat
from fanfold.tune.candidates import Candidate, neighbours
from fanfold.tune.jobs import Job
from fanfold.tune.journal import Journal, Outcome
from fanfold.tune.search import climb
from fanfold.tune.table import write_row
from fanfold.tune.trials import Trials

Progress = Callable[[int, int, str], None]
TRIALS = 64
"""Candidates of one layer and number of tokens; some seconds each, most of them the compiler's."""


class Measuring(Protocol):
    """What tries candidates of one job."""

    def measure(self, candidate: Candidate) -> Outcome:
        """One trial."""
        ...


def tune(
    shapes: Sequence[LayerShape],
    formats: Sequence[WeightFormat],
    tokens: Sequence[int],
    *,
    trials: int = TRIALS,
    progress: Progress | None = None,
) -> Iterator[dict[str, Any]]:
    """Looks for faster configs of layers on this machine's GPU, and writes them into the user's tables.

    Each candidate is verified as `fanfold bench` verifies, and timed as it times: replays of a CUDA graph, weights from
    memory, uniform routing. Every trial is written down; broken off, the same call goes on where it was.

    Args:
        shapes: the layers.
        formats: of their weights.
        tokens: of a call; a row of a table serves up to four times more or fewer.
        trials: candidates of one layer and number of tokens.
        progress: called with (done, total, what).

    Yields:
        A row a layer, format and number of tokens, as `tuned` has it.

    Raises:
        UnavailableError: there is no GPU, or none with kernels.
        UnsupportedError: a layer whose configs no table has.
    """
    try:
        device = device_named("cuda")
    except UnavailableError as error:
        raise UnavailableError(
            "fanfold tune",
            found=error.found,
            expected="the GPU that layers shall run on",
            next_step="Run it on that machine; `fanfold explain --arch NN` needs no GPU.",
        ) from error
    gpu, arch = torch.cuda.get_device_name(device), arch_of(device)
    jobs = [Job.of(shape, fmt, count, gpu, arch) for shape in shapes for fmt in formats for count in tokens]
    versions = {name: str(found) for name, found in machine(device).items() if name in ("torch", "triton", "fanfold")}

    def trials_of(job: Job) -> Measuring:
        return Trials(job.shape, job.format, job.tokens, job.implementation, device)

    yield from tuned(jobs, versions, trials_of, trials, progress)


def tuned(
    jobs: Sequence[Job],
    versions: Mapping[str, str],
    trials_of: Callable[[Job], Measuring],
    trials: int,
    progress: Progress | None = None,
) -> Iterator[dict[str, Any]]:
    """Tunes every job, whatever measures.

    Args:
        jobs: of one GPU.
        versions: of torch, Triton and fanfold; trials of others count for nothing.
        trials_of: makes what measures a job; asked only where a trial is not in the journal.
        trials: candidates of a job.
        progress: called with (done, total, what).

    Yields:
        `shape`, what `Job.row` has, `kernel`, `gpu`, `path` (the table), `start_us`, `us`, `floor_us` (0: not known),
        `start`, `gate_up`, `down` (names of configs), `chained`, `trials`, `whole` (no candidate was left), `refused`
        (why there is no row, or None).
    """
    for number, job in enumerate(jobs):
        yield _tuned(job, versions, trials_of, trials, number * trials, len(jobs) * trials, progress)


def _tuned(
    job: Job,
    versions: Mapping[str, str],
    trials_of: Callable[[Job], Measuring],
    trials: int,
    done: int,
    total: int,
    progress: Progress | None,
) -> dict[str, Any]:
    journal = Journal(user_folder() / "trials.jsonl")
    path = user_table(job.implementation, job.gpu)
    about = {"kernel": job.implementation, "gpu": job.gpu, "layer": job.row, "weights": job.format.name, **versions}
    made: list[Measuring] = []
    count, refusals = 0, list[str]()

    def measure(candidate: Candidate) -> float | None:
        nonlocal count
        if progress is not None:
            progress(done + count, total, f"{job.shape.name} {job.format} {job.tokens} tokens: {candidate.name}")
        count += 1

        def trial() -> Outcome:
            if not made:
                made.append(trials_of(job))
            return made[0].measure(candidate)

        found = journal.outcome(about, candidate.settings, trial)
        refusals.extend([] if found.refused is None else [found.refused])
        return found.us

    start, fits, floor = job.start(), job.fits(), job.floor_us()
    found = climb(start, lambda candidate: neighbours(candidate, fits), measure, trials)
    result: dict[str, Any] = {
        "shape": job.shape.name,
        **job.row,
        "kernel": job.implementation,
        "gpu": job.gpu,
        "path": str(path),
        "start": start.name,
        "floor_us": floor,
    }
    if found is None:
        none = dict.fromkeys(("start_us", "us", "gate_up", "down", "chained", "whole"))
        return {**result, **none, "trials": count, "refused": refusals[0]}
    best = found.best
    row = {**job.row, **best.settings, "us": {"layer": round(found.us, 2), "floor": round(floor, 2)}}
    if job.implementation == SM90:
        row["run"] = 0
    header = {"kernel": job.implementation, "gpu": job.gpu, "arch": job.arch, "dtype": "bfloat16"}
    write_row(path, {**header, "torch": versions["torch"], "triton": versions["triton"]}, row)
    return {
        **result,
        "start_us": found.start_us,
        "us": found.us,
        "gate_up": best.gate_up.name,
        "down": best.down.name,
        "chained": best.chained,
        "whole": found.whole,
        "trials": found.trials,
        "refused": None,
    }
