"""NVFP4 activations of packed projections: scales of the checkpoint and of a call, the product by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fanfold.formats.codec import dequantize
from fanfold.kernels.nvfp4.projection import input_scales, product, with_alphas
from fanfold.kernels.nvfp4.reference import pack_rows, unpack_rows
from fanfold.spec import ProjectionWeights
from samples import numbers, random_projection, relative_error

E, N, K = 4, 24, 64
OFFSETS = torch.tensor([0, 5, 5, 6, 11], dtype=torch.int32)  # an expert without rows, and two rows of no expert
ROWS = 13
GIVEN = [[1 / 300, 1 / 200], [1 / 50, 1 / 900], [1 / 4000, 1 / 2000], [1 / 64, 1 / 64]]
LARGER = [1 / 200, 1 / 50, 1 / 2000, 1 / 64]


def projection(name: str, scales: list[list[float]] | None, biased: bool = False) -> ProjectionWeights:
    """Gate and up with these input scales (multipliers), stored as the format has them."""
    made = random_projection(name, E, 2, N, K)
    tensors = dict(made.tensors)
    if scales is not None:
        stored = torch.tensor(scales)
        tensors["input_scale"] = 1 / stored if name.endswith("divisor") else stored
    return ProjectionWeights(made.format, N, K, tensors, numbers(E, 2, N, seed=5) if biased else None)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor"])
def test_gate_and_up_share_the_larger_scale(name: str) -> None:
    found = input_scales(projection(name, GIVEN))
    torch.testing.assert_close(found, torch.tensor(LARGER), rtol=3e-7, atol=0)
    assert torch.equal(input_scales(projection(name, None)), torch.zeros(E))


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), -1 / 64])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor"])
def test_scales_that_are_none_count_as_missing(name: str, bad: float) -> None:
    """A file's divisor of infinity is a scale of 0, one of 0 a scale of infinity."""
    scales = [*GIVEN[:2], [bad, GIVEN[2][1]], [bad, bad]]
    found = input_scales(projection(name, scales))
    torch.testing.assert_close(found, torch.tensor([*LARGER[:3], 0.0]), rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor"])
def test_alphas_multiply_both_global_scales(name: str) -> None:
    weights, scales = projection(name, GIVEN), torch.tensor(LARGER)
    made = with_alphas(weights, scales)
    stored = weights.tensors["global_scale"].double()
    expected = (1 / stored if name.endswith("divisor") else stored) * scales.double()[:, None]
    assert not made.format.divisor
    assert len(expected.unique()) == 2 * E
    torch.testing.assert_close(made.tensors["global_scale"].double(), expected, rtol=3e-7, atol=0)
    assert all(made.tensors[field] is weights.tensors[field] for field in ("packed", "scale"))


def by_hand(x: Tensor, weights: ProjectionWeights, scales: list[float]) -> Tensor:
    """fp64: each row packed with its expert's scale, both operands dequantised."""
    expected = torch.zeros(ROWS, 2 * N, dtype=torch.float64)
    bounds = OFFSETS.tolist()
    for e in range(E):
        rows = slice(bounds[e], bounds[e + 1])
        packed = pack_rows(x[rows], torch.full((bounds[e + 1] - bounds[e],), scales[e]))
        values = unpack_rows(*packed).double() * scales[e]
        for p in range(2):
            w = dequantize(weights.format, weights.matrix(e, p), N, K).double()
            bias = 0 if weights.bias is None else weights.bias[e, p].double()
            expected[rows, p * N : (p + 1) * N] = values @ w.T + bias
    return expected


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor"])
def test_the_product_by_hand(name: str, biased: bool) -> None:
    weights, x = projection(name, GIVEN, biased), 3 * numbers(ROWS, K)
    found = product(x, weights, OFFSETS)
    expected = by_hand(x, weights, LARGER)
    assert found.dtype == torch.float32
    assert relative_error(found, expected) < 1e-6
    assert bool((found[11:] == 0).all())
    for e, (start, end) in enumerate(pairwise(OFFSETS.tolist())):  # a wrong alpha of one expert
        if end > start:
            assert relative_error(found[start:end], expected[start:end]) < 1e-6, e
    gate = x[:5].double() @ dequantize(weights.format, weights.matrix(0, 0), N, K).double().T
    assert biased or 0.05 < relative_error(found[:5, :N], gate) < 0.2


def test_experts_without_a_scale_share_one_made_of_their_rows() -> None:
    """Experts 0 and 3 have none: 2688 of their scales are the largest number of their rows, not of others'."""
    weights = projection("nvfp4", [[0.0, 0.0], GIVEN[1], GIVEN[2], [float("nan"), 0.0]])
    x = numbers(ROWS, K)
    x[8, 3], x[5, 1], x[12, 2] = -50.0, 900.0, 4000.0  # of expert 3, of expert 2, of none
    made = float(torch.tensor(50.0) / 2688)
    found = product(x, weights, OFFSETS)
    assert relative_error(found, by_hand(x, weights, [made, LARGER[1], LARGER[2], made])) < 1e-6
    assert product(x[:0], weights, torch.zeros(E + 1, dtype=torch.int32)).shape == (0, 2 * N)
    zeros = product(torch.zeros(ROWS, K), weights, OFFSETS)
    assert torch.equal(zeros, torch.zeros(ROWS, 2 * N))


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    weights, x = projection("nvfp4-divisor", GIVEN), numbers(ROWS, K)
    whole = product(x, weights, OFFSETS)
    for row, expert in ((0, 0), (5, 2), (10, 3)):
        offsets = (torch.arange(E + 1) > expert).int()
        assert torch.equal(product(x[row : row + 1], weights, offsets)[0], whole[row])
