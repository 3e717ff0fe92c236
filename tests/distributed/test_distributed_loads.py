"""Placements by a table of loads."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from fanfold.distributed import Placement, placements_by_load
from fanfold.errors import ArgumentError, CorruptFileError, MissingFileError
from skewed_routing import counts_of, popularity


def test_full_experts_go_to_ranks_of_their_own_and_every_rank_holds_as_many() -> None:
    counts = [50, 1, 40, 2, 30, 3, 20, 4]
    placement = Placement.by_load(counts, 4)
    assert sorted(map(len, placement.ranks)) == [2, 2, 2, 2]
    assert placement.loads(counts) == [51, 42, 33, 24]
    assert Placement.even(8, 4).max_over_mean(counts) == pytest.approx(51 / 37.5)


def test_a_copy_halves_the_fullest_experts_rows() -> None:
    counts = [90, 10, 10, 10]
    placement = Placement.by_load(counts, 2, copies=2)
    assert placement.copies[0] == 2
    assert placement.loads(counts) == [60, 60]
    assert Placement.by_load(counts, 2).max_over_mean(counts) == pytest.approx(100 / 60)


def test_nearly_as_good_as_the_best_of_all() -> None:
    """Against every placement of 8 experts, 4 on each of 2 ranks."""
    for seed in range(5):
        counts = counts_of(popularity(8, 1.0, seed), 200, 2, seed).tolist()
        best = min(
            max(sum(c for c, side in zip(counts, sides, strict=True) if side == s) for s in (0, 1))
            for sides in product((0, 1), repeat=8)
            if sum(sides) == 4
        )
        assert max(Placement.by_load(counts, 2).loads(counts)) <= 7 / 6 * best  # Graham's bound for 2 machines


@pytest.mark.parametrize(("ranks", "copies", "better"), [(8, 0, 0.9), (8, 16, 0.8), (64, 0, 0.96), (64, 16, 0.4)])
def test_loads_that_were_not_seen_are_balanced_too(ranks: int, copies: int, better: float) -> None:
    share = popularity(128, 1.0, 0)
    seen, other = (counts_of(share, 4096, 8, seed).tolist() for seed in (1, 2))
    placement = Placement.by_load(seen, ranks, copies)
    assert max(map(len, placement.ranks)) <= -(-(128 + copies) // ranks)
    assert placement.max_over_mean(other) < better * Placement.even(128, ranks).max_over_mean(other)


@pytest.mark.parametrize("counts", [[0] * 6, [7] * 6, [0, 0, 0, 0, 0, 9]])
@pytest.mark.parametrize("copies", range(13))
def test_every_table_of_loads_gives_a_placement(counts: list[int], copies: int) -> None:
    placement = Placement.by_load(counts, 3, copies)
    assert placement.num_experts == 6
    assert sum(placement.loads(counts)) == pytest.approx(sum(counts))


@pytest.mark.parametrize(("counts", "copies"), [([1, -1], 0), ([1, 1], -1), ([1, 1], 3)])
def test_tables_that_are_none(counts: list[int], copies: int) -> None:
    with pytest.raises(ArgumentError, match="expected counts of at least 0, and 0 to 2 copies"):
        Placement.by_load(counts, 2, copies)


def report(file: Path, **fields: object) -> Path:
    layers = [{"layer": layer, "counts": torch.arange(8).roll(layer).tolist()} for layer in (0, 3)]
    runs = [{"adapter": None, "layers": layers}, {"adapter": "a", "layers": layers[1:]}]
    file.write_text(json.dumps({"runs": runs, **fields}))
    return file


def test_the_output_of_fanfold_routing(tmp_path: Path) -> None:
    file = report(tmp_path / "routing.json")
    found = placements_by_load(file, 2, copies=1)
    assert list(found) == [0, 3]
    assert found[3] == Placement.by_load([5, 6, 7, 0, 1, 2, 3, 4], 2, 1)
    assert list(placements_by_load(file, 2, adapter="a")) == [3]
    with pytest.raises(ArgumentError, match="found 'b'; expected one of None, 'a'"):
        placements_by_load(file, 2, adapter="b")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="No such file"):
        placements_by_load(tmp_path / "none.json", 2)
    with pytest.raises(CorruptFileError, match="without layers"):
        placements_by_load(report(tmp_path / "a.json", runs=[]), 2)
    for text in ("[]", "{", '{"runs": [{"layers": [{}]}]}'):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(CorruptFileError, match="no report"):
            placements_by_load(tmp_path / "b.json", 2)
