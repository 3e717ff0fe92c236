"""The block-aligned plan: its reference by hand, and in Triton against it, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.errors import ArgumentError
from fanfold.routing.reference import plan_blocks as reference
from fanfold.routing.reference import plan_sort
from graphs import check_replays, dirty_memory

FORMS = pytest.mark.parametrize("few", [True, False], ids=["few rows", "many rows"])
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])


def test_reference_by_hand() -> None:
    ids = torch.tensor([[2, 0], [0, -1]])
    blocks = reference(ids, 3, 2)
    assert blocks.entries.tolist() == [1, 2, 0, 4, 4, 4]
    assert blocks.experts.tolist() == [0, 2, -1]
    assert blocks.padded_total.tolist() == [4]
    assert reference(ids, 3, 2, packed=True).entries.tolist() == [0, 1, 2, 4, 4, 4]
    ids = torch.tensor([[1], [1], [1], [5]])  # four blocks at most, two of them past the last
    blocks = reference(ids, 4, 2)
    assert blocks.entries.tolist() == [0, 1, 2, 4, 4, 4, 4, 4]
    assert blocks.experts.tolist() == [1, 1, -1, -1]
    assert blocks.padded_total.tolist() == [4]


def test_b7_the_reference_has_whole_blocks() -> None:
    blocks = reference(torch.arange(17)[:, None] % 8, 8, 16)
    assert blocks.entries.shape == (128,)
    assert blocks.padded_total.item() == 128
    assert (blocks.entries == 17).sum() == 128 - 17


@PACKED
def test_reference_holds_every_row_of_an_expert_once(packed: bool) -> None:
    ids = torch.randint(-1, 8, (50, 3))
    blocks = reference(ids, 7, 8, packed)
    route = plan_sort(ids, 7)
    for expert in range(7):
        entries = blocks.entries.view(-1, 8)[blocks.experts == expert].flatten()
        start, end = route.expert_offsets[expert : expert + 2].tolist()
        wanted = torch.arange(start, end) if packed else route.sorted_rows[start:end]
        assert entries[entries < 150].tolist() == wanted.tolist()


def check(ids: Tensor, experts: int, block_rows: int, packed: bool = False, few: bool | None = None) -> None:
    """Plans in one form, or in the one that is chosen."""
    from fanfold.routing import blocks

    with pytest.MonkeyPatch.context() as patch:
        if few is not None:
            patch.setattr(blocks, "FEW_ROWS", 2**20 if few else -1)
        dirty_memory(ids.device.type)
        found = blocks.plan_blocks(ids, experts, block_rows, packed)
    wanted = reference(ids, experts, block_rows, packed)
    assert torch.equal(found.entries, wanted.entries)
    assert torch.equal(found.experts, wanted.experts)
    assert torch.equal(found.padded_total, wanted.padded_total)
    assert (found.block_rows, found.packed) == (block_rows, packed)


@FORMS
@PACKED
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block_rows"),
    [(1, 8, 12, 16), (20, 4, 6, 32), (40, 1, 1, 16), (5, 3, 9, 1)],
)
def test_random_ids(
    tokens: int, top_k: int, experts: int, block_rows: int, packed: bool, few: bool, device: str
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), dtype=torch.int32, device=device)
    check(ids, experts, block_rows, packed, few)


@FORMS
@PACKED
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), experts=st.integers(1, 9), top_k=st.integers(1, 4), block_rows=st.sampled_from([4, 16]))
def test_any_ids(
    data: st.DataObject, experts: int, top_k: int, block_rows: int, packed: bool, few: bool, device: str
) -> None:
    row = st.lists(st.integers(-1, experts), min_size=top_k, max_size=top_k)
    rows = data.draw(st.lists(row, min_size=1, max_size=30))
    check(torch.tensor(rows, dtype=torch.int32, device=device), experts, block_rows, packed, few)


@FORMS
def test_b23_all_tokens_to_one_expert(few: bool, device: str) -> None:
    check(torch.zeros(4, 1, dtype=torch.int32, device=device), 8, 16, few=few)
    check(torch.full((4, 1), 7, dtype=torch.int32, device=device), 8, 16, few=few)


@FORMS
def test_d10_no_rows_no_experts_no_id(few: bool, device: str) -> None:
    for tokens, experts, expert in ((0, 4, 0), (3, 0, 0), (0, 0, 0), (5, 4, -1), (5, 4, 4)):
        check(torch.full((tokens, 2), expert, dtype=torch.int32, device=device), experts, 16, few=few)


def test_a_block_of_no_power_of_two_is_refused(device: str) -> None:
    with pytest.raises(ArgumentError, match="block_rows: found 24; expected a power of two"):
        check(torch.zeros(1, 1, dtype=torch.int32, device=device), 1, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [1023, 1024, 1025, 2048, 4096])
@pytest.mark.parametrize("tokens", [64, 500])
def test_d1_more_experts_than_threads(experts: int, tokens: int) -> None:
    check(torch.randint(-1, experts + 1, (tokens, 8), device="cuda"), experts, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [8, 64, 128, 256, 512])
@pytest.mark.parametrize("rows", [1024, 1032, 70000, 131072])
def test_d3_many_rows(rows: int, experts: int) -> None:
    torch.manual_seed(0)
    check(torch.randint(-1, experts + 1, (rows // 8, 8), device="cuda"), experts, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 2000])
def test_replays(tokens: int) -> None:
    from fanfold.routing.blocks import plan_blocks

    def call(ids: Tensor) -> list[Tensor]:
        blocks = plan_blocks(ids, 128, 16)
        return [blocks.entries, blocks.experts, blocks.padded_total]

    batches = [torch.randint(-1, 129, (tokens, 8), device="cuda") for _ in range(3)]
    check_replays(call, [[ids] for ids in [*batches, torch.zeros_like(batches[0]), torch.full_like(batches[0], -1)]])


MADE = dict.fromkeys(["entries_ptr", "experts_ptr", "total_ptr"], "*i32") | {"limit": "i32", "R": "i32", "E": "i32"}


@ALL_ARCHS
def test_compiles(arch: str) -> None:
    from fanfold.routing.blocks import FEW_ROWS, blocks_kernel, few_blocks_kernel, few_warps

    for experts, packed in ((128, False), (512, False), (512, True), (4096, False)):
        case = f"{experts} experts, {'sorted positions' if packed else 'rows'}"
        sizes = {"BLOCK_E": experts, "BLOCK_M": 64, "PACKED": packed}
        types = {"ids_ptr": "*i64", **MADE}
        for block_r in (128, FEW_ROWS):
            found = compile_kernel(
                few_blocks_kernel,
                types,
                {"BLOCK_R": block_r, **sizes},
                arch,
                few_warps(block_r),
                f"{block_r} rows, {case}",
            )
            check_fits(found, arch)
        types = {"offsets_ptr": "*i32", "sorted_ptr": "*i32", **MADE}
        check_fits(compile_kernel(blocks_kernel, types, sizes, arch, 4, case), arch)
