from __future__ import annotations

from types import SimpleNamespace

import pytest
from small_checkpoints import parts

from fanfold.errors import ConfigError
from fanfold.formats.blocks import block_of


def found(shape: list[int], n: int, k: int) -> tuple[int, int]:
    return block_of("module", SimpleNamespace(shape=shape), n, k)


@pytest.mark.parametrize(
    ("shape", "n", "k", "block"),
    [
        ([], 64, 128, (128, 128)),
        ([1, 1, 1, 1], 64, 128, (128, 128)),
        ([2, 3], 256, 384, (128, 128)),
        ([2, 3], 192, 300, (128, 128)),  # partial
        ([2, 1, 3, 1], 256, 384, (128, 128)),
        ([1, 2], 128, 256, (128, 128)),
        ([2, 1], 128, 256, (64, 256)),  # no transposed default
        ([4, 8], 256, 512, (64, 64)),
        ([4, 1, 8, 1], 256, 512, (64, 64)),
        ([1, 1, 2, 1], 32, 64, (128, 32)),
        ([2, 4], 32, 64, (16, 16)),
        ([3, 4], 80, 128, (32, 32)),  # 80 = 32 + 32 + 16
        ([3, 4], 96, 128, (32, 32)),
        ([64, 1], 64, 128, (1, 128)),  # a scale a row and block of columns
    ],
)
def test_blocks_that_the_scales_tell(shape: list[int], n: int, k: int, block: tuple[int, int]):
    assert found(shape, n, k) == block


@pytest.mark.parametrize(
    ("shape", "n", "k", "text"),
    [
        ([2, 4], 96, 128, "scales [2, 4] for a weight [96, 128]: blocks of 48 or 64 x 32"),
        ([2, 2], 64, 96, "blocks of 32 x 48 or 64"),
        ([2, 1, 2, 1], 96, 96, "blocks of 48 or 64 x 48 or 64"),
    ],
)
def test_nothing_is_guessed_where_blocks_differ(shape: list[int], n: int, k: int, text: str):
    with pytest.raises(ConfigError) as caught:
        found(shape, n, k)
    assert text in parts(caught.value)
    assert caught.value.what == "module: block of the scales"
    assert "Add weight_block_size" in caught.value.next_step


@pytest.mark.parametrize("shape", [[3], [2, 2, 2], [2, 2, 2, 2], [0, 4], [65, 4], [5, 5, 5, 5, 5]])
def test_impossible_scales_are_left_to_the_check_of_shapes(shape: list[int]):
    assert found(shape, 64, 128) == (128, 128)


def test_missing_scales_are_left_to_the_check_of_fields():
    assert block_of("module", None, 64, 128) == (128, 128)
