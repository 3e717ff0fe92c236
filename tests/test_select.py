"""select: pure, the same answer for the same question, with reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.select import IMPLEMENTATIONS, arch_name, check, choose, verdicts
from fanfold.spec import ExpertShape, WeightFormat
from fanfold.spec.job import LayerJob
from fanfold.spec.verdict import Accepted, Rejected


def job(name: str = "gptq4-g128", dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> LayerJob:
    shape = ExpertShape(**{"num_experts": 8, "hidden": 256, "intermediate": 512, **sizes})
    fmt = WeightFormat.parse(name)
    return LayerJob(shape, fmt, fmt, "silu" if shape.gated else "relu2", dtype)


@pytest.mark.parametrize(
    ("given", "name"), [(90, "sm_90"), ("90", "sm_90"), ("sm_90", "sm_90"), ("SM90", "sm_90"), (100, "sm_100")]
)
def test_arch_names(given: int | str, name: str) -> None:
    assert arch_name(given) == name


def test_the_cpu_is_an_arch() -> None:
    assert arch_name("CPU") == "cpu"


@pytest.mark.parametrize("given", [9, 9000, "hopper", "", "sm_", "cuda", -90])
def test_unknown_archs(given: int | str) -> None:
    with pytest.raises(ArgumentError, match="arch: found"):
        arch_name(given)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_the_reference_runs_on_a_cpu(implementation: str) -> None:
    assert Accepted("reference") in verdicts(job(), "cpu", implementation)
    assert choose(job(), "cpu", implementation) == "reference"


@pytest.mark.parametrize(
    ("asked", "arch", "chosen"),
    [
        (job(), "sm_90", "grouped_int4_sm90"),
        (job("awq4-g64-asym"), "sm_90", "grouped_int4_sm90"),
        (job("packed4-g32"), "sm_90", "grouped_int4_sm90"),
        (job("nvfp4"), "sm_90", "grouped_int4_sm90"),
        (job("mxfp4"), "sm_90", "grouped_int4_sm90"),
        (job(dtype=torch.float16), "sm_90", "grouped_int4_sm90"),
        (job("mxfp4", torch.float16), "sm_90", "grouped"),
        (job(dtype=torch.float32), "sm_90", "grouped"),
        (job("gptq8-g128"), "sm_90", "grouped"),
        (job("gptq4-g256"), "sm_90", "grouped"),
        (job(hidden=288), "sm_90", "grouped"),
        (job(intermediate=288), "sm_90", "grouped"),
        (job(gated=False), "sm_90", "grouped"),
        (job("bf16"), "sm_90", "grouped"),
        (job(), "sm_80", "grouped"),
        (job(), "sm_100", "grouped"),
        (job(), "cpu", "reference"),
    ],
)
def test_what_runs_where(asked: LayerJob, arch: str, chosen: str) -> None:
    assert choose(asked, arch) == chosen


def test_every_implementation_has_a_verdict() -> None:
    for arch in ("cpu", "sm_75", "sm_80", "sm_90"):
        assert {verdict.kernel for verdict in verdicts(job(), arch)} == set(IMPLEMENTATIONS) - {"auto"}


def test_reasons_name_what_is_in_the_way() -> None:
    def reason(asked: LayerJob, arch: str = "sm_90", implementation: str = "auto") -> dict[str, str]:
        return {v.kernel: v.reason for v in verdicts(asked, arch, implementation) if isinstance(v, Rejected)}

    assert reason(job("bf16"))["grouped_int4_sm90"].startswith("gate_up: bf16: runs 4-bit gptq")
    assert "group_size 256: runs 32, 64, 128" in reason(job("gptq4-g256"))["grouped_int4_sm90"]
    assert "float16 activations" in reason(job("nvfp4", torch.float16))["grouped_int4_sm90"]
    assert "gate_up: 2 x 512 rows, K = 288" in reason(job(hidden=288))["grouped_int4_sm90"]
    assert "down: 1 x 256 rows, K = 288" in reason(job(intermediate=288))["grouped_int4_sm90"]
    assert "relu2" in reason(job(gated=False))["grouped_int4_sm90"]
    assert reason(job(), "sm_80")["grouped_int4_sm90"] == "needs a Hopper GPU (sm_90)"
    assert "not sm_75" in reason(job(), "sm_75")["grouped"]
    assert reason(job(), implementation="grouped")["grouped_int4_sm90"] == "grouped was asked for"


def test_a_gpu_runs_the_reference_only_when_asked() -> None:
    assert "a check, not an engine" in next(
        v.reason for v in verdicts(job(), "sm_90") if isinstance(v, Rejected) and v.kernel == "reference"
    )
    assert choose(job(), "sm_90", "reference") == "reference"
    assert choose(job(), "sm_75", "reference") == "reference"


@pytest.mark.parametrize(
    ("arch", "implementation"),
    [("sm_75", "auto"), ("cpu", "grouped"), ("sm_80", "grouped_int4_sm90"), ("cpu", "grouped_int4_sm90")],
)
def test_nothing_runs(arch: str, implementation: str) -> None:
    for ask in (lambda: choose(job(), arch, implementation), lambda: check(arch, implementation)):
        with pytest.raises(UnavailableError) as caught:
            ask()
        assert caught.value.what == f"expert layer on {arch}"
        assert 'implementation="reference"' in caught.value.next_step


def test_what_a_device_can_run_at_all() -> None:
    for arch, implementation in (
        ("cpu", "auto"),
        ("sm_80", "auto"),
        ("sm_90", "grouped_int4_sm90"),
        ("sm_75", "reference"),
    ):
        check(arch, implementation)


def test_unknown_implementations() -> None:
    for ask in (lambda: verdicts(job(), "cpu", "triton"), lambda: check("cpu", "triton")):
        with pytest.raises(ArgumentError, match="found 'triton'; expected one of auto, reference"):
            ask()
