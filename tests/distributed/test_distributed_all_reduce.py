"""Experts over ranks that have the same tokens, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributed_jobs import EXPERTS, TOKENS, batch, forward, forward_in_pairs, weights_of
from ranks import Ranks
from torch import Tensor

from fanfold.distributed import Placement
from fanfold.layers.reference import layer
from samples import SILU

FORMATS = ["bf16", "gptq4-g32-actorder", "nvfp4"]
COPIED = {
    2: Placement(((0, 1, 2, 3, 7), (4, 5, 6, 7))),
    4: Placement(((6, 0), (1, 2, 6), (3, 7, 4), (5, 6, 7))),
}


def single(name: str, dtype: torch.dtype, tokens: int = TOKENS) -> Tensor:
    x, ids, weights = batch(dtype, tokens)
    return layer(x, ids, weights, weights_of(name), SILU)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_give_the_bits_of_one_process(name: str, ranks: Ranks) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        expected = single(name, dtype)
        for found in ranks.run(forward, name, dtype, None, TOKENS, {}):
            assert torch.equal(found, expected)


def test_copies_and_any_order_of_experts_change_no_bit(ranks: Ranks) -> None:
    expected = single("gptq4-g32", torch.float16)
    for found in ranks.run(forward, "gptq4-g32", torch.float16, COPIED[ranks.size], TOKENS, {}):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_stay_within_the_tolerance_that_is_stated(dtype: torch.dtype, ranks: Ranks) -> None:
    x, ids, weights = batch(dtype)
    stack = weights_of("nvfp4")
    rows = torch.stack([layer(x, ids[:, [s]], torch.ones(TOKENS, 1), stack, SILU) for s in range(ids.shape[1])])
    here = (ids >= 0).T
    size = torch.where(here, weights.T, 0)[..., None] * rows.double().abs()
    bound = ((ranks.size + 1) * torch.finfo(dtype).eps / 2 + 2 * ids.shape[1] * 2.0**-24) * size.sum(0)
    expected = single("nvfp4", dtype).double()
    for found in ranks.run(forward, "nvfp4", dtype, None, TOKENS, {"exact": False}):
        assert bool(((found.double() - expected).abs() <= bound).all())


def test_no_tokens(ranks: Ranks) -> None:
    for options in ({}, {"exact": False}):
        assert [y.shape for y in ranks.run(forward, "bf16", torch.bfloat16, None, 0, options)] == [(0, 64)] * ranks.size


def test_ranks_may_hold_copies_of_one_expert_alone(ranks: Ranks) -> None:
    first = Placement(((*range(EXPERTS),), *[(0,)] * (ranks.size - 1)))
    expected = single("nvfp4", torch.bfloat16)
    for found in ranks.run(forward, "nvfp4", torch.bfloat16, first, TOKENS, {}):
        assert torch.equal(found, expected)


def test_two_groups_of_two_ranks_each_with_a_layer_of_its_own(ranks_of: Callable[[int], Ranks]) -> None:
    for rank, found in enumerate(ranks_of(4).run(forward_in_pairs, "nvfp4", torch.bfloat16)):
        assert torch.equal(found, layer(*batch(torch.bfloat16, TOKENS, rank // 2), weights_of("nvfp4"), SILU))
