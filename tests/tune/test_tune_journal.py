"""The journal: what it holds is not tried again, whatever way a process ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fanfold.tune.journal import Journal, Outcome

JOB, CANDIDATE = {"layer": 1, "torch": "2.11"}, {"block_t": 8}


class Trial:
    def __init__(self, outcome: Outcome | BaseException) -> None:
        self.outcome = outcome
        self.calls = 0

    def __call__(self) -> Outcome:
        self.calls += 1
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "new" / "trials.jsonl")


@pytest.mark.parametrize("outcome", [Outcome(12.5), Outcome(None, "wrong: norm off")])
def test_an_outcome_is_kept(tmp_path: Path, outcome: Outcome) -> None:
    trial = Trial(outcome)
    assert journal(tmp_path).outcome(JOB, CANDIDATE, trial) == outcome
    assert journal(tmp_path).outcome(dict(reversed(JOB.items())), CANDIDATE, trial) == outcome
    assert trial.calls == 1
    for job, candidate in ((JOB | {"torch": "2.12"}, CANDIDATE), (JOB, {"block_t": 16})):
        journal(tmp_path).outcome(job, candidate, trial)
    assert trial.calls == 3


def test_an_interrupted_trial_is_tried_again(tmp_path: Path) -> None:
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            journal(tmp_path).outcome(JOB, CANDIDATE, Trial(KeyboardInterrupt()))
    assert journal(tmp_path).outcome(JOB, CANDIDATE, Trial(Outcome(3.0))) == Outcome(3.0)


def test_what_kills_the_process_twice_is_left_alone(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    for _ in range(2):
        with pytest.raises(Killed):
            journal(tmp_path).outcome(JOB, CANDIDATE, Trial(Killed()))
    trial = Trial(Outcome(3.0))
    assert journal(tmp_path).outcome(JOB, CANDIDATE, trial) == Outcome(None, "did not come back 2 times")
    assert trial.calls == 0


def test_half_a_line_is_passed_over(tmp_path: Path) -> None:
    journal(tmp_path).outcome(JOB, CANDIDATE, Trial(Outcome(3.0)))
    path = tmp_path / "new" / "trials.jsonl"
    path.write_text(path.read_text() + '{"job": {"lay')
    trial = Trial(Outcome(4.0))
    assert journal(tmp_path).outcome(JOB, {"block_t": 16}, trial) == Outcome(4.0)
    found = journal(tmp_path)
    assert found.outcome(JOB, CANDIDATE, trial) == Outcome(3.0)
    assert found.outcome(JOB, {"block_t": 16}, trial) == Outcome(4.0)
    assert trial.calls == 1
    assert len([line for line in path.read_text().splitlines() if json_of(line)]) == 4


def json_of(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
