"""The grouped product: each expert's rows by its weights, one rounding, rows of no expert 0."""

from __future__ import annotations

import pytest
import torch

from fanfold.kernels.grouped.reference import grouped
from samples import numbers, relative_error

E, N, K = 4, 24, 40
OFFSETS = torch.tensor([0, 3, 3, 20, 25], dtype=torch.int32)
ROWS = 30  # the last five are of no expert


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_against_fp64(dtype: torch.dtype, with_bias: bool) -> None:
    x, w = numbers(ROWS, K, dtype=dtype), numbers(E, N, K, seed=1)
    bias = numbers(E, N, seed=2, dtype=torch.bfloat16) if with_bias else None
    asked: list[int] = []

    def weight_of(expert: int) -> torch.Tensor:
        asked.append(expert)
        return w[expert]

    found = grouped(x, weight_of, OFFSETS, N, bias)
    assert (found.dtype, found.shape) == (dtype, (ROWS, N))
    assert asked == [0, 2, 3]  # expert 1 has no rows
    for e, (start, end) in enumerate([(0, 3), (3, 3), (3, 20), (20, 25)]):
        if start < end:
            exact = x[start:end].double() @ w[e].double().T + (0 if bias is None else bias[e].double())
            assert relative_error(found[start:end], exact) <= max(1e-6, torch.finfo(dtype).eps)
    assert torch.equal(found[25:], torch.zeros(5, N, dtype=dtype))


def test_the_bias_is_added_before_the_one_rounding() -> None:
    """1 + 2^-9 is 1 in bf16; with a bias of 2^-9 more the sum is 1 + 2^-8, which rounds to even, 1, and 2^-7 above."""
    x, w = torch.ones(1, 2).bfloat16(), torch.tensor([[[1.0, 2.0**-9]]])
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    assert grouped(x, lambda e: w[e], offsets, 1).item() == 1.0
    assert grouped(x, lambda e: w[e], offsets, 1, torch.tensor([[2.0**-8]])).item() == 1.0 + 2.0**-7


def test_d10_no_rows() -> None:
    none = torch.zeros(E + 1, dtype=torch.int32)
    assert grouped(numbers(0, K), lambda e: numbers(N, K), none, N).shape == (0, N)
    assert torch.equal(grouped(numbers(5, K), lambda e: numbers(N, K), none, N), torch.zeros(5, N))
