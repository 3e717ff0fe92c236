"""Experts over ranks that have tokens of their own, against one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from distributed_jobs import HIDDEN, TOP_K, batch, forward_own, tokens_of, weights_of
from ranks import Ranks
from test_distributed_all_reduce import COPIED
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fanfold.distributed import Placement
from fanfold.distributed.all_to_all import AllToAll, Bounded
from fanfold.distributed.exchange import ByRow
from fanfold.distributed.peers import Peers
from fanfold.distributed.places import Places
from fanfold.errors import ArgumentError
from fanfold.layers.reference import layer
from samples import SILU

BOUNDS = [None, 12 * TOP_K]


def single(name: str, dtype: torch.dtype, rank: int) -> Tensor:
    x, ids, weights = batch(dtype, tokens_of(rank), rank)
    return layer(x, ids, weights, weights_of(name), SILU)


@pytest.mark.parametrize(
    ("name", "bound"),
    [("bf16", None), ("gptq4-g32-actorder", None), ("nvfp4", None), ("nvfp4", 12 * TOP_K), ("nvfp4", 100)],
)
def test_rows_give_the_bits_of_one_process(name: str, bound: int | None, ranks: Ranks) -> None:
    found = ranks.run(forward_own, name, torch.bfloat16, None, {"bound": bound})
    for rank, y in enumerate(found):
        assert torch.equal(y, single(name, torch.bfloat16, rank))


@pytest.mark.parametrize("bound", BOUNDS)
def test_copies_and_any_order_of_experts_change_no_bit(bound: int | None, ranks: Ranks) -> None:
    found = ranks.run(forward_own, "gptq4-g32", torch.float16, COPIED[ranks.size], {"bound": bound})
    for rank, y in enumerate(found):
        assert torch.equal(y, single("gptq4-g32", torch.float16, rank))


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_stay_within_the_tolerance_that_is_stated(dtype: torch.dtype, bound: int | None, ranks: Ranks) -> None:
    stack = weights_of("nvfp4")
    found = ranks.run(forward_own, "nvfp4", dtype, None, {"bound": bound, "exact": False})
    for rank, y in enumerate(found):
        x, ids, weights = batch(dtype, tokens_of(rank), rank)
        ones = torch.ones(len(x), 1)
        rows = torch.stack([layer(x, ids[:, [s]], ones, stack, SILU) for s in range(TOP_K)])
        size = torch.where((ids >= 0).T, weights.T, 0)[..., None] * rows.double().abs()
        limit = ((ranks.size + 1) * torch.finfo(dtype).eps / 2 + 2 * TOP_K * 2.0**-24) * size.sum(0)
        assert bool(((y.double() - single("nvfp4", dtype, rank).double()).abs() <= limit).all())


@pytest.fixture
def fake_group() -> Iterator[Peers]:
    """4 ranks of which this process is number 1, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield cast("Peers", SimpleNamespace(group=dist.group.WORLD, rank=1, size=4))
    dist.destroy_process_group()


def test_with_a_bound_no_size_depends_on_a_value(fake_group: Peers) -> None:
    """On the meta device there are no values: what reads one raises."""
    meta = torch.device("meta")
    places = Places(Placement.even(8, 4), 1, meta)
    seen: list[tuple[int, ...]] = []

    def run(hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None) -> Tensor:
        assert adapter_ids is not None
        seen.append((*hidden.shape, *ids.shape, *weights.shape, *adapter_ids.shape))
        return torch.empty_like(hidden)

    arguments: Any = (
        torch.empty(5, HIDDEN, device=meta),
        torch.empty(5, TOP_K, dtype=torch.int64, device=meta),
        torch.empty(5, TOP_K, device=meta),
        torch.empty(5, dtype=torch.int32, device=meta),
    )
    bounded = Bounded(fake_group, places, 16)
    assert bounded(run, *arguments).shape == (5, HIDDEN)
    assert ByRow(bounded, 8)(run, *arguments).shape == (5, HIDDEN)
    assert seen == [(64, HIDDEN, 64, TOP_K, 64, TOP_K, 64), (64, HIDDEN, 64, 1, 64, 1, 64)]
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        AllToAll(fake_group, places)(run, *arguments)
    with pytest.raises(ArgumentError, match="found 5 rows; expected at most 4"):
        Bounded(fake_group, places, 4)(run, *arguments)
