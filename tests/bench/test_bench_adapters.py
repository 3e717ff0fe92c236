"""Random pairs are laid out as kernels read them, and popularities have the statistics of their names."""

import pytest
import torch

from fanfold.bench.adapters import (
    POPULARITIES,
    Popularity,
    adapter_ids,
    layer_pairs,
    pair_bytes,
    pair_flops,
    random_pairs,
)
from fanfold.bench.batches import Batch, pairs_met
from fanfold.bench.jobs import LayerShape
from fanfold.spec import ExpertShape

SHAPE = LayerShape("test", ExpertShape(3, 256, 128), 2)
CPU = torch.device("cpu")


def test_popularities() -> None:
    assert adapter_ids("identical", 5, 3, 0).tolist() == [0] * 5
    assert adapter_ids("distinct", 5, 3, 0).tolist() == [0, 1, 2, 0, 1]
    uniform = adapter_ids("uniform", 8000, 4, 0).bincount(minlength=4)
    assert all(1800 < int(count) < 2200 for count in uniform)
    skewed = adapter_ids("skewed", 12_500, 4, 0).bincount(minlength=4)  # 1 + 1/2 + 1/3 + 1/4 = 25/12
    for count, expected in zip(skewed.tolist(), (6000, 3000, 2000, 1500), strict=True):
        assert count == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("popularity", POPULARITIES)
def test_ids(popularity: Popularity) -> None:
    ids, again = (adapter_ids(popularity, 100, 7, 3) for _ in range(2))
    assert (ids.dtype, ids.shape) == (torch.int32, (100,))
    assert torch.equal(ids, again)
    assert bool(((ids >= 0) & (ids < 7)).all()) or (popularity == "none" and bool((ids == -1).all()))


@pytest.mark.parametrize(("rank", "padded"), [(4, 8), (16, 16), (17, 24)])
def test_pairs(rank: int, padded: int) -> None:
    pairs = random_pairs(SHAPE, rank, torch.bfloat16, CPU, 0)
    assert len(pairs) == 9
    stored = 0
    for (projection, _), pair in pairs.items():
        k, n = (128, 256) if projection == "down" else (256, 128)
        assert (pair.a.shape, pair.b.shape, pair.rank) == ((rank, k), (n, rank), rank)
        assert (pair.a.stride(), pair.b.stride()) == ((k, 1), (padded, 1))
        assert pair.a.data_ptr() % 16 == pair.b.data_ptr() % 16 == 0
        whole = pair.b.as_strided((n, padded), (padded, 1))
        assert float(whole[:, rank:].abs().sum()) == 0
        stored += 2 * padded * (k + n)
    assert stored == 3 * pair_bytes(SHAPE, rank, torch.bfloat16)


def test_changes_are_half_as_large_as_an_output() -> None:
    pair = random_pairs(SHAPE, 16, torch.float32, CPU, 0)["gate", 1]
    x = torch.randn(500, 256, generator=torch.Generator().manual_seed(1234))
    assert float((pair.scale * x @ pair.a.T @ pair.b.T).std()) == pytest.approx(0.5, rel=0.2)


def test_seeds_and_slots() -> None:
    first, again, other = (random_pairs(SHAPE, 4, torch.float32, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(first["up", 2].a, again["up", 2].a)
    assert not torch.equal(first["up", 2].a, other["up", 2].a)
    assert layer_pairs([first, other])["up"][1, 2] is other["up", 2]


def test_work_of_a_row() -> None:
    assert pair_flops(SHAPE, 4) == 2 * 3 * (256 * 4 + 4 * 128)


def test_pairs_met() -> None:
    ids, nothing = torch.tensor([[0, 1], [1, 2], [0, 2]], dtype=torch.int32), torch.zeros(3, 2)
    batch = Batch(nothing, ids, nothing, torch.tensor([0, 0, 5], dtype=torch.int32))
    assert pairs_met(batch) == 5  # (0, 0) (0, 1) (0, 2) (5, 0) (5, 2)
    assert pairs_met(Batch(nothing, ids, nothing)) == 0
