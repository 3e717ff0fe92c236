"""Kernels with experts of other ranks among the ids, and NCCL with the one rank that a single GPU can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parts import OneAfterAnother, part, put_pairs
from torch import Tensor

from fanfold import Experts
from fanfold.distributed import ExpertParallel, Placement
from fanfold.distributed.exchange import ByRow
from graphs import check_replays, same_bits
from samples import SILU, numbers, random_experts, random_pairs, random_routing

E, H, INNER, K, SLOTS = 8, 256, 128, 3, 2
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FORMATS = pytest.mark.parametrize("name", ["gptq4-g128", "nvfp4"])
FIXED = [{}, {"exact": False}, {"exchange": "all_to_all", "bound": 40}]


def module(name: str, experts: tuple[int, ...], place: str) -> Experts:
    weights = part(random_experts(name, E, H, INNER), experts)
    return Experts(weights, SILU, dtype=torch.bfloat16, batch_invariant=True).to(place)


def batch(tokens: int, place: str, seed: int = 0) -> list[Tensor]:
    """x, ids, scores and adapter slots."""
    ids, scores = random_routing(tokens, K, E, seed)
    slots = torch.arange(tokens, dtype=torch.int32) % (SLOTS + 1) - 1
    return [part.to(place) for part in (numbers(tokens, H, seed=seed, dtype=torch.bfloat16), ids, scores, slots)]


@PLACES
@FORMATS
def test_what_ranks_make_of_their_experts_adds_up_to_the_layer_bit_by_bit(name: str, place: str) -> None:
    placement = Placement(((5, 0, 3), (1, 2), (4, 6), (7, 5)))
    pairs = random_pairs(random_experts(name, E, H, INNER), SLOTS)
    everything = tuple(range(E))
    whole = module(name, everything, place)
    parts = [module(name, experts, place) for experts in placement.ranks]
    for layer, experts in ((whole, everything), *zip(parts, placement.ranks, strict=True)):
        put_pairs(layer, pairs, SLOTS, experts)
    spread = ByRow(OneAfterAnother(placement, parts), E)
    for tokens in (1, 2, 70):
        x, ids, scores, slots = batch(tokens, place)
        for adapter_ids in (None, slots):
            found = spread(whole.run, x, ids, scores, adapter_ids)
            assert same_bits(found, whole(x, ids, scores, adapter_ids))


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def one_rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of a group of one rank: NCCL's on a GPU, gloo's on a CPU."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = request.param
    options: Any = {"backend": "gloo"} if place == "cpu" else {"backend": "nccl", "device_id": torch.device("cuda", 0)}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
    yield place
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [*FIXED, {"exchange": "all_to_all"}], ids=str)
@FORMATS
def test_one_rank_has_the_bits_of_the_layer(name: str, options: dict[str, Any], one_rank: str) -> None:
    whole = module(name, tuple(range(E)), one_rank)
    spread = ExpertParallel(module(name, tuple(range(E)), one_rank), **options)
    for tokens in (1, 13):
        x, ids, scores, _ = batch(tokens, one_rank)
        assert same_bits(spread(x, ids, scores), whole(x, ids, scores))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_compiled_in_one_graph(one_rank: str) -> None:
    spread = ExpertParallel(module("nvfp4", tuple(range(E)), one_rank))
    x, ids, scores, _ = batch(13, one_rank)
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(spread, fullgraph=True, backend="aot_eager")(x, ids, scores)
    assert same_bits(found, spread(x, ids, scores))


@pytest.mark.gpu
@pytest.mark.parametrize("one_rank", ["cuda"], indirect=True)
@pytest.mark.parametrize("options", FIXED, ids=str)
def test_a_captured_graph_replays_for_any_routing(options: dict[str, Any], one_rank: str) -> None:
    spread = ExpertParallel(module("gptq4-g128", tuple(range(E)), one_rank), **options)
    check_replays(lambda *given: [spread(*given)], [batch(13, one_rank, seed)[:3] for seed in range(3)])
