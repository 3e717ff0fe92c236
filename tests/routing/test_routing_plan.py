"""The plan in Triton against the reference, bit for bit, in both forms: in the interpreter, on a GPU, compiled."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.errors import ArgumentError
from fanfold.routing.reference import plan_sort as reference
from fanfold.routing.reference import work_items, work_list
from graphs import check_replays, dirty_memory

FORMS = pytest.mark.parametrize("one_launch", [True, False], ids=["one launch", "two launches"])


def check(ids: Tensor, experts: int, tile: int, one_launch: bool | None = None) -> None:
    """Plans in one form, or in the one that is chosen."""
    from fanfold.routing import plan

    with pytest.MonkeyPatch.context() as patch:
        if one_launch is not None:
            patch.setattr(plan, "takes_one_launch", lambda rows, experts: one_launch)
        dirty_memory(ids.device.type)
        route, work = plan.plan_sort(ids, experts, tile)
        dirty_memory(ids.device.type)
        other, items = plan.plan_items(ids, experts, tile)
    wanted, words = reference(ids, experts), work_items(reference(ids, experts), tile)
    for found in (route, other):
        assert torch.equal(found.expert_offsets, wanted.expert_offsets)
        assert torch.equal(found.sorted_rows, wanted.sorted_rows)
        assert torch.equal(found.positions, wanted.positions)
        assert found.top_k == ids.shape[1]
    assert work.tile == items.tile == tile
    assert torch.equal(work.slots, work_list(wanted, tile).slots)
    assert torch.equal(items.items, words.items)
    inside = torch.arange(tile, device=ids.device) < work.slots[:, 2:3]
    assert torch.equal(items.rows[inside], words.rows[inside])
    assert (items.total, items.single, items.num_experts) == (ids.numel(), False, experts)


@FORMS
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile"),
    [
        (20, 4, 6, 64),
        (100, 3, 5, 32),
        (5, 3, 9, 1),
    ],
)
def test_random_ids(tokens: int, top_k: int, experts: int, tile: int, one_launch: bool, device: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), dtype=torch.int32, device=device)
    check(ids, experts, tile, one_launch)


@FORMS
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), experts=st.integers(1, 9), top_k=st.integers(1, 4), tile=st.sampled_from([4, 16]))
def test_any_ids(data: st.DataObject, experts: int, top_k: int, tile: int, one_launch: bool, device: str) -> None:
    row = st.lists(st.integers(-1, experts), min_size=top_k, max_size=top_k)
    rows = data.draw(st.lists(row, min_size=1, max_size=40))
    check(torch.tensor(rows, dtype=torch.int32, device=device), experts, tile, one_launch)


@FORMS
def test_all_rows_to_one_expert_and_none(one_launch: bool, device: str) -> None:
    for expert in (6, 7):
        check(torch.full((60, 3), expert, dtype=torch.int32, device=device), 7, 16, one_launch)


@FORMS
def test_a17_ids_of_other_ranks_are_skipped_however_large(one_launch: bool, device: str) -> None:
    """An int64 id that is in range once narrowed to int32 is out of range all the same."""
    ids = torch.tensor([[2**32 + 1, 1], [-1, -(2**31)], [2**31 - 1, 4]], device=device)
    check(ids, 4, 16, one_launch)


def test_d10_no_rows_and_no_experts(device: str) -> None:
    check(torch.empty(0, 2, dtype=torch.int32, device=device), 4, 16)
    check(torch.zeros(3, 2, dtype=torch.int32, device=device), 0, 16)
    check(torch.empty(0, 2, dtype=torch.int32, device=device), 0, 16)


def test_ids_may_be_strided(device: str) -> None:
    check(torch.randint(0, 5, (6, 8), device=device)[:, ::2], 5, 4)


@pytest.mark.parametrize(
    ("rows", "experts", "one_launch"),
    [
        (0, 128, True),
        (4096, 256, True),
        (4097, 8, False),
        (4096, 513, False),
        (512, 4096, True),
        (513, 4096, False),
    ],
)
def test_which_form_is_taken(rows: int, experts: int, one_launch: bool) -> None:
    from fanfold.routing.plan import takes_one_launch

    assert takes_one_launch(rows, experts) is one_launch


def test_chunks_are_about_one_an_sm_and_bounded() -> None:
    from fanfold.routing.plan import plan_chunk

    assert [plan_chunk(rows) for rows in (1, 32768, 32769, 131072, 2**20)] == [256, 256, 512, 1024, 2048]


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("experts", [1023, 1024, 1025, 2048, 4096])
def test_d1_more_experts_than_threads(experts: int, one_launch: bool) -> None:
    check(torch.randint(-1, experts + 1, (500, 8), device="cuda"), experts, 16, one_launch)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [8, 64, 128, 256, 512])
@pytest.mark.parametrize("rows", [16384, 16392, 65536, 70000, 131072, 300000])
def test_d3_many_rows(rows: int, experts: int) -> None:
    torch.manual_seed(0)
    check(torch.randint(-1, experts + 1, (rows // 8, 8), device="cuda"), experts, 64)
    skewed = (torch.rand(rows // 8, 8, device="cuda") ** 4 * experts).int()
    check(skewed, experts, 64)


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize(("tokens", "experts"), [(8, 128), (4096, 512)])
def test_replays(tokens: int, experts: int, one_launch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from fanfold.routing import plan

    monkeypatch.setattr(plan, "takes_one_launch", lambda rows, experts: one_launch)

    def call(ids: Tensor) -> list[Tensor]:
        route, work = plan.plan_sort(ids, experts, 16)
        _, items = plan.plan_items(ids, experts, 16)
        return [route.expert_offsets, route.sorted_rows, route.positions, work.slots, items.items]

    batches = [torch.randint(-1, experts + 1, (tokens, 8), device="cuda") for _ in range(3)]
    check_replays(call, [[ids] for ids in [*batches, torch.zeros_like(batches[0]), torch.full_like(batches[0], -1)]])


PLANNED = dict.fromkeys(["ids_ptr", "offsets_ptr", "sorted_ptr", "positions_ptr", "rows_ptr"], "*i32") | {
    "R": "i32",
    "E": "i32",
}


def test_what_words_have_no_room_for() -> None:
    from fanfold.routing.plan import plan_items

    ids = torch.zeros(1, 1, dtype=torch.int32)
    for experts, tile in ((2**15 + 1, 16), (8, 2**16)):
        with pytest.raises(ArgumentError, match=f"{experts} experts, tiles of {tile} rows"):
            plan_items(ids, experts, tile)


@ALL_ARCHS
def test_one_launch_compiles(arch: str) -> None:
    from fanfold.routing.plan import plan_block, plan_warps
    from fanfold.routing.plan_kernels import plan_kernel

    for rows, words in ((8, True), (1024, False), (16384, True), (16384, False)):
        block = plan_block(rows)
        types = {**PLANNED, "work_ptr": "*i64" if words else "*i32"}
        constants = {"TILE": 64, "BLOCK": block, "WORDS": words}
        case = f"{rows} rows, {'words' if words else 'slots'}"
        check_fits(compile_kernel(plan_kernel, types, constants, arch, plan_warps(block), case), arch)


@ALL_ARCHS
def test_two_launches_compile(arch: str) -> None:
    for rows, experts, words in ((20000, 128, True), (131072, 512, False), (2**20, 32, True), (2**20, 4096, True)):
        compile_two_launches(rows, experts, words, arch)


def compile_two_launches(rows: int, experts: int, words: bool, arch: str) -> None:
    from fanfold.routing.plan import COUNT_BLOCK, place_block, plan_chunk
    from fanfold.routing.plan_kernels import count_kernel, place_kernel

    case = f"{rows} rows, {experts} experts"
    sizes = {"CHUNK": plan_chunk(rows), "BLOCK_E": max(32, experts)}
    types = {"ids_ptr": "*i64", "counts_ptr": "*i32", "R": "i32", "E": "i32"}
    check_fits(compile_kernel(count_kernel, types, {"BLOCK": COUNT_BLOCK, **sizes}, arch, 8, case), arch)
    types = {**PLANNED, "ids_ptr": "*i64", "counts_ptr": "*i32", "chunks": "i32"}
    types["work_ptr"] = "*i64" if words else "*i32"
    constants = {"WORDS": words, "TILE": 64, "BLOCK_C": place_block(sizes["BLOCK_E"]), **sizes}
    case += f", {'words' if words else 'slots'}"
    check_fits(compile_kernel(place_kernel, types, constants, arch, 8, case), arch)
