"""Trials of the portable product in the interpreter: right candidates are timed, wrong ones are not."""

from __future__ import annotations

import pytest
import torch

from fanfold.bench.checking import Check
from fanfold.bench.jobs import layer_shape
from fanfold.spec import WeightFormat
from fanfold.spec.launch import LaunchConfig
from fanfold.tune.journal import Outcome
from fanfold.tune.trials import unlike

START = LaunchConfig(16, 16, 16, 4, 1, False, 16)


def test_candidates_are_verified_before_they_are_timed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fanfold.layers.implementations import grouped
    from fanfold.tune.candidates import Candidate
    from fanfold.tune.trials import Trials

    timed: list[int] = []
    shape, fmt = layer_shape("4,2,64,32"), WeightFormat.parse("gptq4-g32")
    trials = Trials(
        shape,
        fmt,
        3,
        "grouped",
        torch.device(device),
        torch.float16,
        clock=lambda calls: timed.append(len(calls)) or Outcome(7.5),
    )
    found = trials.measure(Candidate(START, START))
    assert (found.us, found.refused) == (7.5, None)
    other = LaunchConfig(32, 32, 32, 4, 1, True, 16)
    assert trials.measure(Candidate(other, other)).us == 7.5
    assert len(timed) == 2
    combine = grouped.combine
    monkeypatch.setattr(grouped, "combine", lambda *parts: combine(*parts) * 1.5)
    assert str(trials.measure(Candidate(START, START)).refused).startswith("wrong: relative error 5.0e-01")
    monkeypatch.setattr(grouped, "combine", lambda *parts: 1 / 0)
    assert trials.measure(Candidate(START, START)).refused == "ZeroDivisionError: division by zero"
    assert len(timed) == 2


def test_all_tokens_are_like_the_first_candidate_s() -> None:
    check = Check(error=0.002, plain_error=0.003, norm_off=0, largest=0.01, plain_largest=0.02)
    first = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    assert unlike(first * 1.004, first, check) is None
    assert unlike(first * 1.01, first, check) == "relative difference 1.0e-02, limit 6.0e-03"
    spoilt = first.clone()
    spoilt[50, 3] += 0.2
    assert str(unlike(spoilt, first, check)).startswith("one value differs by 2.0e-01")
    spoilt[50, 3] = torch.nan
    assert unlike(spoilt, first, check) is not None
