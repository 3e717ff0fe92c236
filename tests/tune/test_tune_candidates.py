"""Candidates: configs that kernels have, one step from another."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from fanfold.bench.jobs import LAYERS, layer_shape
from fanfold.errors import UnsupportedError
from fanfold.kernels.grouped.sm90.config import Sm90Config, misfits
from fanfold.spec import WeightFormat
from fanfold.spec.launch import LaunchConfig
from fanfold.tune.candidates import Candidate, neighbours
from fanfold.tune.jobs import Job

QWEN = LAYERS["qwen3-30b"]


def job(fmt: str, arch: str = "sm_90", tokens: int = 16, shape: str = "qwen3-30b") -> Job:
    return Job.of(layer_shape(shape), WeightFormat.parse(fmt), tokens, "NVIDIA H200", arch)


def changes(before: Candidate, after: Candidate) -> set[str]:
    """Fields that differ."""
    found = {"chained"} if before.chained != after.chained else set[str]()
    for side in ("gate_up", "down"):
        old, new = asdict(getattr(before, side)), asdict(getattr(after, side))
        found |= {f"{side}.{name}" for name in old if old[name] != new[name]}
    return found


TILE = {f"{side}.{name}" for side in ("gate_up", "down") for name in ("block_t", "smallest_t")}


@pytest.mark.parametrize("fmt", ["gptq4-g128", "nvfp4", "fp8-channel", "bf16", "gptq8-g128"])
@pytest.mark.parametrize("tokens", [1, 256, 4096])
def test_neighbours_differ_in_one_field(fmt: str, tokens: int) -> None:
    one = job(fmt, tokens=tokens)
    start, fits = one.start(), one.fits()
    assert fits(start)
    found = neighbours(start, fits)
    assert len(found) > 4
    assert len(set(found)) == len(found)
    for other in found:
        changed = changes(start, other)
        assert len(changed) == 1 or changed <= TILE
        assert other.gate_up.block_t == other.down.block_t
        assert start in neighbours(other, fits) or "smallest_t" in str(changed)  # steps can be taken back


def test_candidates_of_hopper_fit_the_weights() -> None:
    one = job("gptq4-g128")
    fits, seen, waiting = one.fits(), set[Candidate](), [one.start()]
    while waiting and len(seen) < 200:
        candidate = waiting.pop()
        if candidate not in seen:
            seen.add(candidate)
            waiting += neighbours(candidate, fits)
    for candidate in seen:
        assert isinstance(candidate.gate_up, Sm90Config)
        assert isinstance(candidate.down, Sm90Config)
        assert misfits(candidate.gate_up, one.format, 1536, 2048, True) == ()
        assert misfits(candidate.down, one.format, 2048, 768, False) == ()
    assert len({candidate.down.parts for candidate in seen if isinstance(candidate.down, Sm90Config)}) > 1


def test_sums_fit_in_registers_and_steps_in_groups() -> None:
    fits = job("gptq8-g64", "sm_89").fits()
    right = LaunchConfig(64, 64, 64, 4, 3, True, 64)
    assert fits(Candidate(right, right))
    for wrong in (
        LaunchConfig(256, 64, 64, 4, 3, True, 64),  # 2 * 256 * 64 sums of 128 threads
        LaunchConfig(64, 128, 64, 4, 3, True, 64),  # steps of two groups
    ):
        assert not fits(Candidate(wrong, right))
    assert fits(Candidate(right, LaunchConfig(128, 64, 64, 4, 3, True, 64)))


def test_a_job_is_a_row_of_its_kernel_s_table() -> None:
    sizes = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768, "tokens": 16}
    for fmt, arch, kernel, family in (
        ("gptq4-g128-actorder", "sm_90", "grouped_int4_sm90", "int4"),
        ("nvfp4", "sm_90", "grouped_int4_sm90", "nvfp4"),
        ("gptq4-g128-actorder", "sm_89", "grouped", "gptq4-g128"),
        ("fp8-channel", "sm_90", "grouped", "fp8-channel"),
    ):
        one = job(fmt, arch)
        assert (one.implementation, one.row) == (kernel, {"format": family, **sizes})
    assert job("gptq4-g128").floor_us() == pytest.approx(45.6, abs=0.1)
    assert job("gptq4-g128", "sm_89").floor_us() == 0


def test_a_layer_without_a_gate_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from fanfold.spec import Activation, ExpertShape

    shape = replace(QWEN, experts=ExpertShape(8, 256, 128, gated=False), activation=Activation("relu2"))
    with pytest.raises(UnsupportedError, match="relu2, without a gate"):
        Job.of(shape, WeightFormat.parse("bf16"), 1, "NVIDIA L4", "sm_89")
