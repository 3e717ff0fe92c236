"""The order of the fold in Triton against the reference, integer for integer: in the interpreter, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold.kernels.lora import reference
from fanfold.routing.reference import plan_sort
from fanfold.spec import Route
from fanfold.spec.adapters import AdapterWork
from graphs import check_replays, dirty_memory


@pytest.fixture(autouse=True)
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a second to sort 64 numbers, and more for each chunk."""
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cpu":
        from fanfold.kernels.lora import plan

        monkeypatch.setattr(plan, "CHUNK", (8, 8))


def routed(tokens: int, top_k: int, experts: int, device: str, seed: int = 0, hot: bool = False) -> Route:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=g)
    if hot:
        ids[:, 0] = 1
    return plan_sort(ids.to(device), experts)


def adapters(tokens: int, slots: int, device: str, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, slots + 1, (tokens,), generator=g).int().to(device)


def call(route: Route, ids: Tensor | None, slots: int, tile: int, **options: Any) -> AdapterWork:
    from fanfold.kernels.lora.plan import order_rows

    dirty_memory(route.sorted_rows.device.type)
    return order_rows(route, ids, slots, tile, **options)


def check(route: Route, ids: Tensor | None, slots: int, tile: int, **options: Any) -> AdapterWork:
    found = call(route, ids, slots, tile, **options)
    wanted = reference.order_rows(route, ids, slots, tile, one_slot=options.get("one_slot", -1))
    used = int(route.expert_offsets[-1])
    assert torch.equal(found.items, wanted.items)
    assert torch.equal(found.positions[:used], wanted.positions[:used])
    assert torch.equal(found.rows[:used], wanted.rows[:used])
    return found


@pytest.mark.parametrize(
    ("tokens", "slots", "tile"), [(1, 1, 8), (7, 3, 8), pytest.param(24, 2, 16, marks=pytest.mark.gpu)]
)
def test_rows_of_no_expert_no_slot_and_the_base(tokens: int, slots: int, tile: int, device: str) -> None:
    check(routed(tokens, 2, 3, device), adapters(tokens, slots, device), slots, tile)


def test_an_expert_with_more_rows_than_a_program_takes(device: str) -> None:
    if device == "cpu":
        check(routed(20, 1, 3, device, hot=True), adapters(20, 2, device), 2, 8)
    else:
        check(routed(5000, 2, 3, device, hot=True), adapters(5000, 5, device), 5, 16)


def test_tokens_with_unknown_ids_are_counted_once(device: str) -> None:
    route = routed(6, 2, 3, device)
    ids = torch.tensor([2, -5, 0, 2**31 - 1, 1, 3], dtype=torch.int32, device=device)
    unknown = torch.full((1,), 10, dtype=torch.int32, device=device)
    check(route, ids, 2, 8, unknown=unknown)
    assert unknown.item() == 13


def test_one_slot_for_all_rows_and_the_base_for_all(device: str) -> None:
    route = routed(3, 2, 2, device)
    assert int(check(route, None, 3, 8, one_slot=2).items[:, 1].max()) == 2
    assert int(check(route, None, 3, 8).items[:, 1].max()) == -1


def test_no_rows_and_no_experts(device: str) -> None:
    assert call(routed(0, 2, 3, device), adapters(0, 2, device), 2, 8).positions.shape == (0,)
    assert int(check(routed(3, 2, 0, device), adapters(3, 2, device), 2, 8).items.numel()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "slots"), [(64, 128, 64), (1024, 128, 4), (3000, 8, 200), (16384, 128, 4)]
)
def test_large_batches(tokens: int, experts: int, slots: int) -> None:
    check(routed(tokens, 8, experts, "cuda"), adapters(tokens, slots, "cuda"), slots, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 700])
def test_replays(tokens: int) -> None:
    place = torch.arange(tokens * 4, device="cuda")

    def run(offsets: Tensor, sorted_rows: Tensor, ids: Tensor) -> list[Tensor]:
        work = call(Route(offsets, sorted_rows, sorted_rows, 4), ids, 8, 16)
        return [work.items, torch.where(place < offsets[-1], work.rows, 0)]

    batches: list[list[Tensor]] = []
    for seed in range(3):
        route = routed(tokens, 4, 32, "cuda", seed)
        batches.append([route.expert_offsets, route.sorted_rows, adapters(tokens, 8, "cuda", seed)])
    check_replays(run, batches)
