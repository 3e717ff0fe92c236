"""The weighted sum: slot order, fp32, ids of other ranks left out."""

from __future__ import annotations

import pytest
import torch

from fanfold.kernels.combine.reference import combine
from samples import numbers, random_routing

T, K, H, E = 7, 3, 16, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_fp32_sum_in_slot_order_and_one_rounding(dtype: torch.dtype) -> None:
    y2 = numbers(T * K, H, dtype=dtype)
    ids, weights = random_routing(T, K, E)
    expected = torch.zeros(T, H)
    for slot in range(K):
        expected += weights[:, slot, None] * y2.view(T, K, H)[:, slot].float()
    found = combine(y2, ids, weights, E)
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))


def test_the_order_is_that_of_the_slots() -> None:
    """(1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1."""
    ids = torch.tensor([[0, 1, 2]])
    ones = torch.ones(1, 3)
    assert combine(torch.tensor([[1e8], [1.0], [-1e8]]), ids, ones, E).item() == 0.0
    assert combine(torch.tensor([[1e8], [-1e8], [1.0]]), ids, ones, E).item() == 1.0


def test_c16_weights_are_applied_once() -> None:
    ids, _ = random_routing(T, K, E)
    scaled = torch.full((T, K), 2.5)
    assert torch.equal(combine(torch.ones(T * K, H), ids, scaled, E), torch.full((T, H), 7.5))


def test_a17_c15_slots_of_another_rank_add_nothing_whatever_lies_there() -> None:
    y2 = numbers(T * K, H)
    ids, weights = random_routing(T, K, E)
    away = ids.clone()
    away[:, 0], away[0] = -1, E
    y2.view(T, K, H)[:, 0] = float("nan")
    y2.view(T, K, H)[0] = float("inf")
    found = combine(y2, away, weights, E)
    assert torch.equal(found[0], torch.zeros(H))
    torch.testing.assert_close(found[1:], (weights[1:, 1:, None] * y2.view(T, K, H)[1:, 1:]).sum(1))


def test_d10_no_tokens_and_no_slots() -> None:
    assert combine(numbers(0, H), torch.empty(0, K).long(), torch.empty(0, K), E).shape == (0, H)
    assert torch.equal(combine(numbers(0, H), torch.empty(T, 0).long(), torch.empty(T, 0), E), torch.zeros(T, H))
