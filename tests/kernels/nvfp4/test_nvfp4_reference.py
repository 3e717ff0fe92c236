"""Tables and rounding rules of NVFP4, exhaustively, and products of packed rows against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from nvfp4_cases import E2M1, awkward_rows, code_edges, e4m3_sizes, rows_of_scales, rows_with_scale

from fanfold.formats import e2m1
from fanfold.formats import nvfp4 as fmt_nvfp4
from fanfold.kernels.nvfp4 import reference
from fanfold.kernels.nvfp4.reference import encode, pack_rows, unpack_rows
from fanfold.spec import WeightFormat
from samples import numbers, relative_error

INF, NAN = math.inf, math.nan


def codes_of(packed: torch.Tensor) -> list[list[int]]:
    return e2m1.unpack_nibbles(packed).tolist()


def test_all_256_bytes_of_codes_and_of_scales() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    one = torch.full((256, 1), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = unpack_rows(every[:, None].repeat(1, 8), one)
    signed = [*E2M1, *(-size for size in E2M1)]
    assert found[:, 0].tolist() == [signed[byte & 15] for byte in range(256)]
    assert found[:, 15].tolist() == [signed[byte >> 4] for byte in range(256)]
    assert torch.signbit(found[8, 0])  # code 8 is -0

    scales = every.view(torch.float8_e4m3fn)[:, None]
    found = unpack_rows(torch.full((256, 8), 0x75, dtype=torch.uint8), scales)  # 3 and 6
    sizes = e4m3_sizes()
    for half, sign in ((0, 1), (128, -1)):
        assert torch.equal(found[half : half + 127, 0].double(), 3 * sign * sizes)
        assert torch.equal(found[half : half + 127, 1].double(), 6 * sign * sizes)
        assert found[half + 127].isnan().all()


def test_unpacking_is_that_of_weights() -> None:
    fmt = WeightFormat.parse("nvfp4")
    tensors = fmt_nvfp4.quantize(fmt, numbers(8, 64))
    tensors["global_scale"] = torch.tensor(1.0)
    found = unpack_rows(tensors["packed"], tensors["scale"])
    assert torch.equal(found, fmt_nvfp4.dequantize(fmt, tensors, 8, 64))


def test_ties_and_saturation() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert encode(ties, "even").tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert encode(ties, "zero").tolist() == [0, 1, 2, 3, 4, 5, 6]
    for rule in ("even", "zero"):
        assert encode(ties.nextafter(torch.tensor(INF)), rule).tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert encode(ties.nextafter(torch.tensor(0.0)), rule).tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert encode(torch.tensor([*E2M1, 6.1, 1e30, INF, NAN]), rule).tolist() == [*range(8), 7, 7, 7, 0]
    edges = code_edges()
    assert torch.equal(encode(edges.abs(), "even"), e2m1.encode(edges) & 7)


def test_one_level_by_hand() -> None:
    x = torch.tensor([[6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2, [-3.0, -2.5, -0.25, -0.0, 0.1, 0, 0, 0] * 2])
    packed, scales = pack_rows(torch.cat([x, torch.zeros(2, 16)], dim=1))
    assert scales.float().tolist() == [[1.0, 1.0], [0.5, 1.0]]  # 1 where all is 0
    codes = codes_of(packed)
    assert codes[0] == [7, 6, 5, 4, 3, 2, 1, 0] * 2 + [0] * 16
    assert codes[1] == [15, 14, 9, 8, 0, 0, 0, 0] * 2 + [0] * 16  # -2.5 / 0.5 is a tie: -4; -0.5 is a code


def test_ties_of_one_level_may_go_to_even() -> None:
    x = rows_with_scale(torch.tensor([0.75, 1.75, 3.5, -0.75]))
    assert codes_of(pack_rows(x)[0])[0][:4] == [1, 3, 5, 9]
    assert codes_of(pack_rows(x, ties="even")[0])[0][:4] == [2, 4, 6, 10]
    assert codes_of(pack_rows(x, torch.ones(1), ties="zero")[0])[0][:4] == [1, 3, 5, 9]


def test_two_levels_by_hand() -> None:
    x = torch.tensor([[6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, -0.25] * 2]).repeat(3, 1)
    packed, scales = pack_rows(x, torch.tensor([1.0, 0.25, 2.0**-20]))
    assert scales.float().tolist() == [[1.0], [4.0], [448.0]]
    codes = codes_of(packed)
    assert codes[0] == codes[1] == [7, 6, 6, 4, 4, 2, 2, 8] * 2
    assert codes[2] == [7, 7, 7, 7, 7, 7, 7, 15] * 2  # the scale saturates, and so do the codes
    packed, scales = pack_rows(x, torch.full((3,), 1e6))  # amax / 6 / gs rounds to 0
    assert scales.float().tolist() == [[0.0]] * 3
    assert codes_of(packed) == [[0] * 16] * 3


def test_scales_are_the_nearest_e4m3_numbers() -> None:
    """Every size of E4M3, every point halfway (to even), and their neighbours; 448 beyond, 0 below 2^-10."""
    x = rows_of_scales()
    wanted = x.double().abs().amax(1) / 6
    sizes = e4m3_sizes()
    for packing in (pack_rows(x), pack_rows(x, torch.ones(len(x)))):
        found = packing[1].double()[:, 0]
        distance = (wanted.float().double()[:, None] - sizes).abs()
        nearest = distance.amin(1)
        inside = wanted <= 448
        assert torch.equal((found - wanted.float()).abs()[inside], nearest[inside])
        tied = inside & ((distance == nearest[:, None]).sum(1) == 2)
        assert tied.sum() >= 100
        assert (packing[1].view(torch.uint8)[:, 0][tied] % 2 == 0).all()
        assert (found[~inside] == 448).all()
    assert (pack_rows(x)[0][wanted < 2.0**-10] == 0).all()


def test_nan_and_infinity() -> None:
    x = torch.ones(3, 32)
    x[0, 3], x[1, 3], x[2, 3] = NAN, INF, -INF
    for packing in (pack_rows(x), pack_rows(x, torch.full((3,), 1.0))):
        found = unpack_rows(*packing)
        assert found[0, :16].isnan().all()
        assert found[1:, 3].tolist() == [2688.0, -2688.0]
        assert (found[:, 16:] - 1).abs().max() < 0.07


def test_negative_values_that_round_to_zero_keep_their_sign() -> None:
    x = rows_with_scale(torch.tensor([-0.1, -0.0, -1e-45, 0.1]))
    for packing in (pack_rows(x), pack_rows(x, torch.ones(1))):
        assert codes_of(packing[0])[0][:4] == [8, 8, 8, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_those_of_four_bits(dtype: torch.dtype) -> None:
    x = numbers(32, 256, dtype=dtype)
    gs = torch.full((32,), float(x.abs().max()) / 2688)
    assert 0.05 < relative_error(unpack_rows(*pack_rows(x)), x) < 0.12
    assert 0.05 < relative_error(unpack_rows(*pack_rows(x, gs)) * gs[:, None], x) < 0.12


def test_rows_are_gathered_by_token() -> None:
    x = awkward_rows(48)
    ids = torch.tensor([3, 0, 8, 8, 2], dtype=torch.int32)
    gs = torch.tensor([0.1, 1.0, 3.0, 1e-4, 2.0])
    for scales in (None, gs):
        found, wanted = pack_rows(x, scales, ids), pack_rows(x[ids.long()], scales)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1].float(), wanted[1].float())
    packed, _ = pack_rows(x, None, torch.tensor([-1, 9, 1], dtype=torch.int32))
    assert (packed[:2] == 0).all()
    assert (packed[2] != 0).any()


def test_products_with_another_alpha_for_every_expert() -> None:
    """Against fp64, norms too: cosine similarity would not see a wrong alpha."""
    x, offsets = numbers(7, 64), torch.tensor([1, 3, 3, 6], dtype=torch.int32)
    packed, scales = pack_rows(x)
    weights = [pack_rows(numbers(5, 64, seed=e)) if e != 1 else None for e in range(3)]
    alphas = torch.tensor([1e-3, 1.0, 70.0])
    out = torch.full((7, 5), 9.0)
    reference.product(packed, scales, None, offsets, weights, alphas, out)
    assert (out[[0, 6]] == 9).all()  # outside the offsets
    for expert, (start, end) in ((0, (1, 3)), (2, (3, 6))):
        matrix = weights[expert]
        assert matrix is not None
        wanted = unpack_rows(packed, scales)[start:end].double() @ unpack_rows(*matrix).double().T * alphas[expert]
        assert relative_error(out[start:end], wanted) < 1e-6
        assert abs(float(out[start:end].double().norm() / wanted.norm()) - 1) < 1e-6
