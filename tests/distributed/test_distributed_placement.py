"""Which rank holds which experts."""

from __future__ import annotations

import pytest
import torch

from fanfold.distributed import Placement
from fanfold.distributed.places import Places
from fanfold.errors import ArgumentError

CPU = torch.device("cpu")


def test_even_is_consecutive_and_differs_by_one_at_most() -> None:
    assert Placement.even(7, 3).ranks == ((0, 1, 2), (3, 4), (5, 6))
    assert Placement.even(8, 4).ranks == ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        (((0, 1), (3,)), "no rank for experts 2"),
        (((0, 1), ()), "rank 1 with experts []"),
        (((0, 1, 1), (2,)), "rank 0 with experts [0, 1, 1]"),
        (((0, -1), (1,)), "rank 0 with experts [0, -1]"),
        ((), "no ranks"),
    ],
)
def test_what_is_no_placement(ranks: tuple[tuple[int, ...], ...], found: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Placement(ranks)
    assert caught.value.found == found


def test_fewer_experts_than_ranks() -> None:
    for make in (lambda: Placement.even(3, 4), lambda: Placement.by_load([1, 1, 1], 4)):
        with pytest.raises(ArgumentError, match="found 3 experts for 4 ranks"):
            make()


def test_rows_find_their_expert_and_copies_take_turns() -> None:
    placement = Placement(((2, 0), (1, 2)))
    assert placement.copies == (1, 1, 2)
    ids = torch.tensor([[2, 0], [2, 1], [2, -1], [3, 2]])
    ranks, numbers = Places(placement, 0, CPU).of(ids)
    assert ranks.tolist() == [[0, 0], [1, 1], [0, -1], [-1, 1]]
    assert numbers.tolist() == [[0, 1], [1, 0], [0, -1], [-1, 1]]
    mine = [Places(placement, rank, CPU).local_ids(ids).tolist() for rank in range(2)]
    assert mine[0] == [[0, 1], [-1, -1], [0, -1], [-1, -1]]
    assert mine[1] == [[-1, -1], [1, 0], [-1, -1], [-1, 1]]


def test_batches_side_by_side_are_dealt_out_each_by_itself() -> None:
    places = Places(Placement(((2, 0), (1, 2))), 1, CPU)
    ids = torch.tensor([[[2], [2]], [[2], [1]]])
    assert places.local_ids(ids).tolist() == [[[-1], [1]], [[-1], [0]]]


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize("every", [1, 2, 8, 128])
def test_copies_share_any_regular_part_of_the_rows(copies: int, every: int) -> None:
    places = Places(Placement(((0,),) * copies), 0, CPU)
    ranks, _ = places.of(torch.zeros(256 * every, 1, dtype=torch.int64))
    counts = ranks[::every].flatten().bincount(minlength=copies)
    assert counts.max() <= 1.1 * 256 / copies
