from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of

from fanfold.errors import UnsupportedError
from fanfold.formats.fields import Field, require_multiple


@pytest.mark.parametrize(
    ("expected", "found", "fits"),
    [
        ((), (1,), True),
        ((), (1, 1), True),
        ((), (2,), False),
        ((8, 1), (8,), True),
        ((8, 1), (1, 8), True),  # the same eight numbers in the same order
        ((2, 3), (2, 1, 3, 1), True),
        ((2, 3), (3, 2), False),
        ((2, 3), (6,), False),
        ((1, 1), (), True),
    ],
)
def test_axes_of_size_1_carry_no_scales(expected: tuple[int, ...], found: tuple[int, ...], fits: bool):
    assert Field(expected, (torch.float32,), squeezable=True).fits(found) is fits
    assert Field(expected, (torch.float32,)).fits(found) is False
    assert Field(expected, (torch.float32,)).fits(list(expected)) is True


@pytest.mark.parametrize("size", [0, -8, 12])
def test_sizes_that_are_no_positive_multiple_are_refused(size: int):
    with pytest.raises(
        UnsupportedError, match=f"gptq4-g32 matrix: found K = {size}; expected K a positive multiple of 8"
    ):
        require_multiple(fmt_of("gptq4-g32"), "K", size, 8)
    require_multiple(fmt_of("gptq4-g32"), "K", 16, 8)
