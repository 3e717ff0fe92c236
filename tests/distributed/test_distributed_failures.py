"""Ranks that die, stay away or hold something else: all ranks end, soon, with an error that names rank and cause."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from failing_jobs import (
    agree_once,
    forward_beside_a_dead_rank,
    load_beside_a_dead_rank,
    load_beside_a_rank_that_does_not,
    load_beside_a_rank_that_ends,
    load_each,
    spread_each,
)
from ranks import Ranks

from fanfold.errors import ArgumentError, CorruptFileError, FanfoldError, RankError
from samples import sample

NAME = "ct_qwen3moe_nvfp4"
SOON = 20.0
"""Seconds: far less than the groups' timeout of 60, far more than a busy machine needs."""


@contextmanager
def fresh(size: int, timeout: float = 60.0) -> Iterator[Ranks]:
    """Ranks of whom some will not survive."""
    ranks = Ranks(size, timeout, mortal=True)
    try:
        yield ranks
    finally:
        ranks.close()


def results(ranks: Ranks, job: Callable[..., Any], *args: Any) -> list[Any]:
    begun = time.monotonic()
    ranks.start(job, *args)
    found = ranks.results()
    assert time.monotonic() - begun < SOON
    return found


ALL_TO_ALL = {"exchange": "all_to_all"}


@pytest.mark.parametrize(("size", "options"), [(4, {}), (2, ALL_TO_ALL), (2, {**ALL_TO_ALL, "bound": 30})])
def test_a_rank_that_dies_in_a_forward_is_named_on_all_others(size: int, options: dict[str, Any]) -> None:
    dead = size // 2
    with fresh(size) as ranks:
        found = results(ranks, forward_beside_a_dead_rank, dead, options)
    assert found.pop(dead) is None
    for error in found:
        assert isinstance(error, RankError)
        assert error.what == f"experts: {options.get('exchange', 'all_reduce')}"
        assert error.found == f"rank {dead} gone: ended, or no sign of life for 1 s"


@pytest.mark.parametrize("job", [load_beside_a_dead_rank, load_beside_a_rank_that_ends])
def test_a_rank_that_dies_while_others_load(job: Callable[..., None]) -> None:
    with fresh(2) as ranks:
        error, dead = results(ranks, job, sample(NAME))
    assert dead is None
    assert isinstance(error, RankError)
    assert error.what == "checkpoint: all but experts"
    assert error.found.startswith("rank 1 gone: ended, or no sign of life")


def test_a_rank_that_does_not_come_is_named_when_the_time_is_over() -> None:
    with fresh(2, timeout=2.0) as ranks:
        error, other = results(ranks, load_beside_a_rank_that_does_not, sample(NAME))
    assert other is None
    assert isinstance(error, RankError)
    assert error.found == "rank 1 elsewhere after 2 s"


def test_a_store_that_is_lost() -> None:
    with fresh(2) as ranks:
        ranks.run(agree_once)
        ranks.lose_the_store()
        for error in results(ranks, agree_once):
            assert isinstance(error, RankError)
            assert error.found.startswith("rank 0 gone with the group's store (Dist")


def test_another_checkpoint_on_a_rank(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    other = Path(shutil.copytree(sample(NAME), tmp_path / NAME))
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    for error in results(ranks_of(2), load_each, [sample(NAME), other]):
        assert isinstance(error, RankError)
        assert error.what == "checkpoint: all but experts: checkpoint"
        assert [part[:8] for part in error.found.split("; ")] == ["rank 0: ", "rank 1: "]


def test_a_file_that_one_rank_can_not_read(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    other = Path(shutil.copytree(sample(NAME), tmp_path / NAME))
    (other / "model.safetensors").write_bytes(b"no safetensors")
    error, own = results(ranks_of(2), load_each, [sample(NAME), other])
    assert isinstance(own, CorruptFileError)
    assert isinstance(error, RankError)
    assert error.found.startswith("rank 1 failed: CorruptFileError: ")
    assert str(other) in error.found


@pytest.mark.parametrize(
    ("names", "options", "what"),
    [
        (["bf16", "nvfp4"], [{}, {}], "formats"),
        (["bf16", "bf16"], [{}, {"exact": False}], "exchange"),
        (["bf16", "bf16"], [{"exchange": "all_to_all", "bound": b} for b in (9, 12)], "exchange"),
    ],
)
def test_layers_of_other_kinds(
    names: list[str], options: list[dict[str, Any]], what: str, ranks_of: Callable[[int], Ranks]
) -> None:
    for error in results(ranks_of(2), spread_each, names, options):
        assert isinstance(error, RankError)
        assert error.what == f"experts: experts of all ranks: {what}"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"exchange": "broadcast"}, "'broadcast'"),
        ({"bound": 8}, "8 for all_reduce"),
        ({"exchange": "all_to_all", "bound": 0}, "0 for all_to_all"),
    ],
)
def test_wrong_arguments_are_the_ranks_own(
    options: dict[str, Any], found: str, ranks_of: Callable[[int], Ranks]
) -> None:
    for error in results(ranks_of(2), spread_each, ["bf16"] * 2, [options] * 2):
        assert isinstance(error, ArgumentError)
        assert isinstance(error, FanfoldError)
        assert error.found == found
