"""Work items: one word an item, its rows beside it; ids of other ranks hold no work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.routing.reference import plan_sort, work_list
from fanfold.spec.work import WorkList
from interpreter import run_in_interpreter


def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def random_ids(tokens: int, top_k: int, experts: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-1, experts + 1, (tokens, top_k), generator=generator, dtype=torch.int32).to(device)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile"), [(1, 2, 8, 8), (40, 3, 5, 8), (9, 8, 64, 16), (70, 1, 2, 64)]
)
def test_items_hold_the_tiles_of_the_work_list(tokens: int, top_k: int, experts: int, tile: int, device: str) -> None:
    from fanfold.kernels.grouped.sm90.items import tiled_items

    route = plan_sort(random_ids(tokens, top_k, experts, device), experts)
    work = work_list(route, tile)
    found = tiled_items(route, work)
    assert (found.total, found.tile, found.single) == (tokens * top_k, tile, False)
    for slot, (expert, first, count, _) in enumerate(work.slots.tolist()):
        item = int(found.items[slot])
        if expert < 0:
            assert item == -1
            continue
        assert (item >> 48, (item >> 32) & 0xFFFF, item & 0xFFFFFFFF) == (expert, count, first)
        assert torch.equal(found.rows[slot, :count], route.sorted_rows[first : first + count])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_single_rows_are_the_ids_themselves(dtype: torch.dtype) -> None:
    """No launch and no copy; ids that lie apart are copied."""
    from fanfold.kernels.grouped.sm90.items import single_items

    ids = random_ids(70, 4, 5, "cpu").to(dtype)
    found = single_items(ids, 5)
    assert (found.total, found.tile, found.single, found.num_experts) == (280, 1, True, 5)
    assert found.items.data_ptr() == ids.data_ptr() == found.rows.data_ptr()
    assert torch.equal(single_items(ids.T, 5).items, ids.T.flatten())


def test_d10_nothing_to_do(device: str) -> None:
    from fanfold.kernels.grouped.sm90.items import single_items, tiled_items

    route = plan_sort(torch.zeros(0, 2, dtype=torch.int32, device=device), 3)
    assert tiled_items(route, work_list(route, 8)).items.tolist() == [-1, -1, -1]
    assert single_items(torch.zeros(0, 2, dtype=torch.int64, device=device), 3).items.shape == (0,)


def test_arrays_of_no_plan() -> None:
    from fanfold.kernels.grouped.sm90.items import single_items, tiled_items

    route = plan_sort(random_ids(9, 2, 4, "cpu"), 4)
    work = work_list(route, 8)
    with pytest.raises(ArgumentError, match=r"work.slots: found int32 \[5, 4\]; expected contiguous int32 \[6, 4\]"):
        tiled_items(route, WorkList(work.slots[:-1], 8))
    with pytest.raises(ArgumentError, match=r"work.slots: found int64"):
        tiled_items(route, WorkList(work.slots.long(), 8))
    with pytest.raises(ArgumentError, match=r"work.tile: found 12"):
        tiled_items(route, WorkList(work.slots, 12))
    with pytest.raises(ArgumentError, match=r"route.sorted_rows: found int64"):
        tiled_items(replace(route, sorted_rows=route.sorted_rows.long()), work)
    with pytest.raises(ArgumentError, match=r"40000 experts; expected at most 32768"):
        tiled_items(replace(route, expert_offsets=torch.zeros(40001, dtype=torch.int32)), work)
    with pytest.raises(ArgumentError, match=r"topk_ids: found float32 \[9, 2\]"):
        single_items(torch.zeros(9, 2), 4)
