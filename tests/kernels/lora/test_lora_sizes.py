"""Sizes of the fold: bounds that hold for every batch, windows that cover it once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fanfold.errors import ArgumentError
from fanfold.kernels.lora import config, sizes, table
from fanfold.kernels.lora.reference import order_rows
from fanfold.routing.reference import plan_sort


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (8, 8), (9, 16), (100, 104), (512, 512)])
def test_ranks_are_padded_to_16_bytes(rank: int, padded: int) -> None:
    assert sizes.padded_rank(rank) == padded


def test_rows_to_tokens() -> None:
    assert [sizes.row_to_token(row, 3) for row in (0, 2, 3, 8)] == [0, 0, 1, 2]


@pytest.mark.parametrize(("rows", "experts", "slots", "tile"), [(8, 128, 4, 8), (2048, 128, 4, 8), (8192, 128, 4, 16)])
def test_tiles_follow_the_rows_of_a_pair(rows: int, experts: int, slots: int, tile: int) -> None:
    assert sizes.row_tile(rows, experts, slots) == tile


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_needs_more_than_the_worst_case_grid(seed: int) -> None:
    """The items of every expert fit between its first and the next one's, whatever its rows' slots."""
    g = torch.Generator().manual_seed(seed)
    tokens, top_k, experts, slots, tile = (int(torch.randint(1, most, (), generator=g)) for most in (40, 4, 7, 9, 5))
    route = plan_sort(torch.randint(0, experts, (tokens, top_k), generator=g), experts)
    adapters = torch.randint(-1, slots, (tokens,), generator=g)
    items = order_rows(route, adapters, slots, tile).items
    used = items[items[:, 0] >= 0]
    assert int(used[:, 3].sum()) == tokens * top_k
    pairs: dict[tuple[int, int], int] = {}
    for expert, slot, _, rows in used.tolist():
        pairs[expert, slot] = pairs.get((expert, slot), 0) + rows
    assert sizes.tile_count(pairs.values(), tile) == len(used)
    grid = sizes.worst_case_grid(tokens * top_k, experts, slots, tile, 100, 64)
    assert grid == (len(items), 2)
    exact = sizes.exact_grid(pairs.values(), tile, 100, 64)
    assert exact[0] <= grid[0]
    assert exact[1] == grid[1]


def test_a_gathered_grid_is_exact() -> None:
    assert sizes.gather_grid(24, 2048, 256) == (24, 8)
    assert sizes.gather_grid(0, 2048, 256) == (0, 8)


@pytest.mark.parametrize(("rows", "cap"), [(10, 4), (8, 4), (1, 100), (7, 1)])
def test_windows_cover_all_rows_once(rows: int, cap: int) -> None:
    found = list(sizes.windows(rows, cap))
    assert [row for start, end in found for row in range(start, end)] == list(range(rows))
    assert all(0 < end - start <= cap for start, end in found)


def test_windows_of_nothing_and_of_no_scratch() -> None:
    assert list(sizes.windows(0, 4)) == []
    with pytest.raises(ArgumentError, match="windows: cap: found 0; expected at least 1 row"):
        sizes.windows(5, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("arch", [0, 80, 90, 120])
def test_every_config_has_whole_steps(dtype: torch.dtype, arch: int) -> None:
    """A part is a multiple of 64 inputs, so a step of it must divide 64; parts of outputs fill a matrix unit."""
    for rank in (1, 16, 17, 512):
        for tile in sizes.ROW_TILES:
            found = config.config_for(rank, tile, dtype, arch)
            assert 64 % (found.block_k // config.SPLIT) == 0
            assert found.block_n // config.SPLIT >= 16
            assert found.num_warps % config.SPLIT == 0
            assert found.block_r >= min(rank, sizes.RANK_TILE)


@pytest.mark.parametrize(("rank", "one"), [(16, True), (32, True), (33, False), (512, False)])
def test_ranks_that_fit_in_one_launch(rank: int, one: bool) -> None:
    assert config.takes_one_launch(rank) is one


@pytest.mark.parametrize(("items", "tiles", "parts"), [(8, 3, 3), (128, 8, 4), (600, 8, 1), (0, 2, 2)])
def test_few_items_are_shared(items: int, tiles: int, parts: int) -> None:
    assert config.parts_for(items, tiles) == parts


def test_sizes_and_tables_need_no_triton() -> None:
    for module in (sizes, table):
        assert "import triton" not in Path(str(module.__file__)).read_text()
