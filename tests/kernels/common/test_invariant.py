"""invariant_matmul: right, and a row's bits depend on that row alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fanfold.kernels.common.invariant import BLOCK_ROWS, invariant_matmul


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 50])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (5, 3), (64, 96), (127, 130)])
def test_the_product(rows: int, inputs: int, outputs: int) -> None:
    x, w = numbers(rows, inputs), numbers(outputs, inputs, seed=1)
    y = invariant_matmul(x, w)
    assert y.shape == (rows, outputs)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)


# Widths at which plain products of MKL do depend on the row's position (odd K, few outputs), and ordinary ones.
SIZES = [(7, 4), (15, 8), (17, 2), (65, 8), (511, 3), (511, 8), (256, 4), (256, 128), (1024, 16), (100, 250)]


@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_a_row_does_not_depend_on_its_position_or_the_other_rows(inputs: int, outputs: int) -> None:
    row, w = numbers(inputs), numbers(outputs, inputs, seed=1)
    alone = invariant_matmul(row[None], w)[0]
    for position in range(BLOCK_ROWS + 2):
        x = numbers(BLOCK_ROWS + 5, inputs, seed=2 + position) * 100
        x[position] = row
        assert torch.equal(invariant_matmul(x, w)[position], alone)


@given(rows=st.integers(1, 40), inputs=st.integers(1, 70), outputs=st.integers(1, 40), seed=st.integers(0, 1000))
def test_rows_apart_equal_rows_together(rows: int, inputs: int, outputs: int, seed: int) -> None:
    x, w = numbers(rows, inputs, seed=seed), numbers(outputs, inputs, seed=seed + 1)
    apart = torch.cat([invariant_matmul(row[None], w) for row in x])
    assert torch.equal(invariant_matmul(x, w), apart)


def test_the_layout_of_w_in_memory_does_not_matter() -> None:
    x, w = numbers(5, 33), numbers(7, 33, seed=1)
    expected = invariant_matmul(x, w)
    shifted = torch.empty(7 * 33 + 1)[1:].view(7, 33).copy_(w)  # not on a boundary of 64 bytes
    assert torch.equal(invariant_matmul(x, shifted), expected)
    assert torch.equal(invariant_matmul(x, w.T.contiguous().T), expected)
    wide, wide_x = numbers(16, 64, seed=2), numbers(5, 64)
    shifted = torch.empty(16 * 64 + 1)[1:].view(16, 64).copy_(wide)
    assert torch.equal(invariant_matmul(wide_x, shifted), invariant_matmul(wide_x, wide))


def test_inputs_are_not_written() -> None:
    x, w = numbers(3, 16), numbers(16, 16)
    before = x.clone(), w.clone()
    invariant_matmul(x, w)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def test_padding_does_not_spread_what_is_not_finite() -> None:
    x, w = numbers(2, 5), numbers(3, 5)
    x[1, 0] = float("inf")
    y = invariant_matmul(x, w)
    assert torch.isfinite(y[0]).all()
    assert torch.isinf(y[1]).all()
