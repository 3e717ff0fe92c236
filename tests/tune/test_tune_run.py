"""tune: a made-up clock on a CPU; broken off and resumed; tables that layers read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fanfold.bench.jobs import layer_shape
from fanfold.errors import UnavailableError
from fanfold.kernels.common.tables import user_folder as found_folder
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.spec import WeightFormat
from fanfold.tune import tune
from fanfold.tune.candidates import Candidate
from fanfold.tune.jobs import Job
from fanfold.tune.journal import Outcome
from fanfold.tune.run import tuned
from user_tables import H200, user_folder

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0", "fanfold": "0.1"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with user_folder(tmp_path):
        yield tmp_path


def job(fmt: str = "gptq4-g128", arch: str = "sm_90", tokens: int = 16) -> Job:
    return Job.of(layer_shape("16,2,1024,512"), WeightFormat.parse(fmt), tokens, H200, arch)


class Clock:
    """Time by the size of stages: the larger the faster; breaks off after so many trials."""

    def __init__(self, breaks: int = 10**9) -> None:
        self.tried: list[Candidate] = []
        self.made = 0
        self.breaks = breaks

    def __call__(self, job: Job) -> Clock:
        self.made += 1
        return self

    def measure(self, candidate: Candidate) -> Outcome:
        if len(self.tried) == self.breaks:
            raise KeyboardInterrupt
        self.tried.append(candidate)
        return made_up(candidate)


def made_up(candidate: Candidate) -> Outcome:
    if candidate.gate_up.block_t == 32:
        return Outcome(None, "OutOfResources: shared memory")
    return Outcome(10000 / (candidate.gate_up.block_k + candidate.down.block_k))


def run(clock: Callable[[Job], Any], *jobs: Job, trials: int = 64, **options: Any) -> list[dict[str, Any]]:
    return list(tuned(jobs, VERSIONS, clock, trials, **options))


@pytest.mark.parametrize(("fmt", "kernel"), [("gptq4-g128", "grouped_int4_sm90"), ("fp8-channel", "grouped")])
def test_the_best_is_in_the_table_and_layers_start_there(fmt: str, kernel: str, folder: Path) -> None:
    one, clock = job(fmt), Clock()
    start = one.start()
    (row,) = run(clock, one)
    best = min(clock.tried, key=lambda candidate: made_up(candidate).us or torch.inf)
    assert (row["start"], row["us"] < row["start_us"], row["whole"]) == (start.name, True, True)
    assert (row["gate_up"], row["down"]) == (best.gate_up.name, best.down.name)
    assert row["path"] == str(folder / "NVIDIA-H200" / f"{kernel}.json")
    table = json.loads(Path(row["path"]).read_text())
    assert (table["kernel"], table["gpu"], table["arch"], table["triton"]) == (kernel, H200, "sm_90", "3.6.0")
    assert one.start() == best


def test_a_search_that_is_broken_off_goes_on(folder: Path) -> None:
    whole = Clock()
    (expected,) = run(whole, job("nvfp4"))
    with user_folder(folder / "again"):
        clocks = [Clock(5), Clock(4), Clock()]
        for clock in clocks[:2]:
            with pytest.raises(KeyboardInterrupt):
                run(clock, job("nvfp4"))
        (row,) = run(clocks[2], job("nvfp4"))
        assert [len(clock.tried) for clock in clocks[:2]] == [5, 4]
        assert [c for clock in clocks for c in clock.tried] == whole.tried
        assert {**row, "path": ""} == {**expected, "path": ""}
        rested = Clock()
        (row,) = run(rested, job("nvfp4"))  # starts from the best, and knows all beside it
        assert (rested.made, row["us"], row["start_us"]) == (0, expected["us"], expected["us"])


def test_rows_of_other_layers_stay(folder: Path) -> None:
    clock = Clock()
    rows = run(clock, job(tokens=16), job(tokens=1), job("mxfp4"))
    table = read_table(Path(rows[0]["path"]))
    assert [(row.format, row.tokens, row.run) for row in table] == [("int4", 1, 0), ("int4", 16, 0), ("mxfp4", 16, 0)]
    assert table[1].us == {"layer": round(rows[0]["us"], 2), "floor": round(rows[0]["floor_us"], 2)}
    run(Clock(), job(tokens=16))
    assert len(read_table(Path(rows[0]["path"]))) == 3


def test_the_page_tells_every_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands" / "tune.md").read_text()
    (row,) = run(Clock(), job(), trials=1)
    assert [name for name in row if f"`{name}`" not in page] == []


def test_progress_and_trials() -> None:
    said: list[tuple[int, int, str]] = []
    rows = run(Clock(), job(), job("fp8-channel"), trials=3, progress=lambda *step: said.append(step))
    assert [(row["trials"], row["whole"]) for row in rows] == [(3, False)] * 2
    assert [step[:2] for step in said] == [(0, 6), (1, 6), (2, 6), (3, 6), (4, 6), (5, 6)]
    assert said[0][2].startswith("16,2,1024,512 gptq4-g128 16 tokens: t8-")


def test_a_layer_that_does_not_run_has_no_row(folder: Path) -> None:
    class Wrong:
        def measure(self, candidate: Candidate) -> Outcome:
            return Outcome(None, "wrong: norm off by 1")

    (row,) = run(lambda job: Wrong(), job())
    assert (row["refused"], row["us"], row["trials"]) == ("wrong: norm off by 1", None, 1)
    assert not Path(row["path"]).exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(UnavailableError, match="fanfold tune: found no GPU that torch can use"):
        next(tune([layer_shape("qwen3-30b")], [WeightFormat.parse("bf16")], [1]))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("fmt", ["gptq4-g128", "fp8-channel"])
def test_on_a_gpu(fmt: str, folder: Path) -> None:
    """A few candidates, verified and timed; the layer then runs with the row, within tolerance."""
    from fanfold.bench.batches import random_batch
    from fanfold.bench.checking import check
    from fanfold.bench.weights import random_experts
    from fanfold.layers.experts import Experts

    shape, device = layer_shape("16,2,1024,512"), torch.device("cuda", 0)
    (row,) = tune([shape], [WeightFormat.parse(fmt)], [16], trials=6)
    assert row["refused"] is None
    assert row["us"] <= row["start_us"]
    assert found_folder() == folder
    lines = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    outcomes: list[Mapping[str, Any]] = [line for line in lines if "us" in line]
    assert len(outcomes) == 6
    batch, weights = (
        random_batch(shape, 16, "uniform", torch.bfloat16, device, 0),
        random_experts(shape, WeightFormat.parse(fmt), device, 0),
    )
    for pinned in (False, True):
        layer = Experts(weights, shape.activation, dtype=torch.bfloat16, batch_invariant=pinned)
        assert check(layer, weights, batch).wrong is None
        after = layer(batch.hidden, batch.topk_ids, batch.topk_weights)
        with user_folder(folder / "none"):
            before = layer(batch.hidden, batch.topk_ids, batch.topk_weights)
        if pinned:
            assert torch.equal(after, before)
