"""Routings have the statistics that their names promise."""

import pytest
import torch

from fanfold.bench.batches import ROUTINGS, Batch, Routing, experts_met, load, random_batch, random_routing
from fanfold.bench.jobs import LayerShape
from fanfold.spec import ExpertShape


def counts(routing: Routing, tokens: int = 4096, experts: int = 64, top_k: int = 4, seed: int = 0) -> torch.Tensor:
    return random_routing(routing, tokens, experts, top_k, seed)[0].flatten().bincount(minlength=experts)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 8), (7, 10, 3), (300, 512, 10)])
def test_an_expert_comes_once_a_token(routing: Routing, tokens: int, experts: int, top_k: int) -> None:
    ids, weights = random_routing(routing, tokens, experts, top_k, 3)
    assert ids.dtype == torch.int32
    assert ids.shape == weights.shape == (tokens, top_k)
    assert bool(((ids >= 0) & (ids < experts)).all())
    assert all(len(row.unique()) == top_k for row in ids)
    torch.testing.assert_close(weights.sum(1), torch.ones(tokens))
    assert bool((weights > 0).all())


def test_uniform() -> None:
    found = counts("uniform").double()
    assert float(found.mean()) == 256
    assert 0.5 * 16 < float(found.std()) < 1.5 * 16  # of 4096 * 4 draws of 64: sqrt(256)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(4096, 64, 4), (10, 64, 10), (33, 7, 2)])
def test_balanced(tokens: int, experts: int, top_k: int) -> None:
    found = counts("balanced", tokens, experts, top_k)
    assert int(found.max() - found.min()) <= 1


def test_power() -> None:
    """Of one draw a token, the n-th most popular expert gets 1/n of what the first gets."""
    found = counts("power", tokens=40_000, top_k=1).sort(descending=True).values.double()
    harmonic = sum(1 / n for n in range(1, 65))
    assert float(found[0]) == pytest.approx(40_000 / harmonic, rel=0.05)
    assert float(found[9]) == pytest.approx(4_000 / harmonic, rel=0.15)
    assert int(counts("power").max()) > 4 * 256


def test_the_popular_expert_is_not_always_the_same() -> None:
    assert len({int(counts("power", seed=seed).argmax()) for seed in range(5)}) > 1


def test_hot() -> None:
    """One expert in every token; the others as likely as each other."""
    found = counts("hot", tokens=4000, experts=9, top_k=2).sort(descending=True).values
    assert int(found[0]) == 4000
    assert int(found[1]) < 1.2 * int(found[-1])
    assert len({int(counts("hot", seed=seed).argmax()) for seed in range(5)}) > 1


def test_load() -> None:
    ids = torch.tensor([[0, 1], [0, 2]], dtype=torch.int32)
    nothing = torch.zeros(2, 1)
    assert load(Batch(nothing, ids, nothing), 8) == 2 * 8 / 4
    assert load(Batch(nothing[:0], ids[:0], nothing[:0]), 8) == 0


@pytest.mark.parametrize("routing", ROUTINGS)
def test_seeds(routing: Routing) -> None:
    first, again, other = (random_routing(routing, 20, 16, 4, seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_batch() -> None:
    shape = LayerShape("test", ExpertShape(16, 512, 32), 4)
    batch = random_batch(shape, 9, "uniform", torch.bfloat16, torch.device("cpu"), 5)
    assert (batch.hidden.shape, batch.hidden.dtype) == ((9, 512), torch.bfloat16)
    assert float(batch.hidden.float().std()) == pytest.approx(1, rel=0.1)
    some = batch[torch.tensor([8, 0])]
    assert torch.equal(some.hidden, batch.hidden[[8, 0]])
    assert torch.equal(some.topk_ids, batch.topk_ids[[8, 0]])
    assert experts_met(some).tolist() == sorted(set(some.topk_ids.flatten().tolist()))
