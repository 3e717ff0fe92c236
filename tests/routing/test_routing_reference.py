"""The plan of a batch: rows in expert order, stable, sentinels last."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fanfold.routing.reference import plan_sort


def by_hand(ids: list[list[int]], experts: int) -> tuple[list[int], list[int], list[int]]:
    """Offsets, sorted rows and positions by plain lists."""
    flat = [e for row in ids for e in row]
    order = [row for e in range(experts) for row, its in enumerate(flat) if its == e]
    offsets = [0]
    for e in range(experts):
        offsets.append(offsets[-1] + flat.count(e))
    order += [row for row, its in enumerate(flat) if not 0 <= its < experts]
    return offsets, order, [order.index(row) for row in range(len(flat))]


def check(ids: Tensor, experts: int) -> None:
    route = plan_sort(ids, experts)
    offsets, order, positions = by_hand(ids.tolist(), experts)
    assert route.expert_offsets.tolist() == offsets
    assert route.sorted_rows.tolist() == order
    assert route.positions.tolist() == positions
    assert (route.top_k, route.num_experts) == (ids.shape[1], experts)
    assert {t.dtype for t in (route.expert_offsets, route.sorted_rows, route.positions)} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_example_of_the_docstring(dtype: torch.dtype) -> None:
    route = plan_sort(torch.tensor([[2, 0], [0, -1]], dtype=dtype), 3)
    assert route.expert_offsets.tolist() == [0, 2, 2, 3]
    assert route.sorted_rows.tolist() == [1, 2, 0, 3]
    assert route.positions.tolist() == [2, 0, 1, 3]


def test_b23_many_tokens_of_one_expert_keep_their_order() -> None:
    route = plan_sort(torch.full((40, 1), 3), 5)
    assert route.expert_offsets.tolist() == [0, 0, 0, 0, 40, 40]
    assert route.sorted_rows.tolist() == list(range(40))


@pytest.mark.parametrize("ids", [torch.empty(0, 2).long(), torch.empty(3, 0).long(), torch.full((4, 2), -1)])
def test_d10_no_tokens_no_slots_or_no_expert_of_this_rank(ids: Tensor) -> None:
    check(ids, 4)
    check(ids, 0)


def test_a17_b20_ids_outside_come_last_in_their_order() -> None:
    ids = torch.tensor([[-1, 1], [4, 0], [2**31 - 1, -(2**31)], [3, 1]])
    check(ids, 4)
    check(torch.tensor([[2**40, 0], [-(2**40), 1]]), 2)
    assert plan_sort(ids, 4).sorted_rows.tolist() == [3, 1, 7, 6, 0, 2, 4, 5]


@pytest.mark.parametrize("experts", [8, 64, 512, 1023, 1024, 1025, 4096])
def test_d1_d3_any_number_of_experts_and_many_rows(experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    ids = torch.randint(-1, experts + 1, (8200, 8), generator=generator)
    route = plan_sort(ids, experts)
    flat = ids.flatten()
    counts = torch.bincount(flat[(flat >= 0) & (flat < experts)], minlength=experts)
    assert torch.equal(route.expert_offsets.diff(), counts.int())
    placed = flat[route.sorted_rows.long()][: int(route.expert_offsets[-1])]
    assert bool((placed.diff() >= 0).all())
    same = placed.diff() == 0
    assert bool((route.sorted_rows[: len(placed)].diff()[same] > 0).all())
    assert torch.equal(route.positions[route.sorted_rows.long()], torch.arange(len(flat), dtype=torch.int32))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 9), st.lists(st.lists(st.integers(-2, 10), min_size=3, max_size=3), max_size=20))
def test_any_routing(experts: int, ids: list[list[int]]) -> None:
    check(torch.tensor(ids, dtype=torch.int64).reshape(len(ids), 3), experts)
