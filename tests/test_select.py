"""select: pure, the same answer for the same question, with reasons."""

from __future__ import annotations

import pytest

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.select import arch_name, choose, verdicts
from fanfold.spec.verdict import Accepted, Rejected


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
    assert verdicts("cpu", implementation) == [Accepted("reference")]
    assert choose("cpu", implementation) == "reference"


def test_a_gpu_runs_the_reference_only_when_asked() -> None:
    (only,) = verdicts("sm_90")
    assert isinstance(only, Rejected)
    assert only.kernel == "reference"
    assert choose("sm_90", "reference") == "reference"
    with pytest.raises(UnavailableError) as caught:
        choose("sm_90")
    assert caught.value.what == "expert layer on sm_90"
    assert 'implementation="reference"' in caught.value.next_step


def test_unknown_implementations() -> None:
    for ask in (verdicts, choose):
        with pytest.raises(ArgumentError, match="found 'triton'; expected one of auto, reference"):
            ask("cpu", "triton")
