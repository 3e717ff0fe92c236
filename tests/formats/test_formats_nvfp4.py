from __future__ import annotations

import pytest
import torch
from format_cases import fmt_of, random_weight
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fanfold.errors import UnsupportedError
from fanfold.formats import codec, nvfp4
from fanfold.formats.e2m1 import decode
from fanfold.formats.stack import stack
from fanfold.spec import WeightFormat

MULTIPLIER, DIVISOR = fmt_of("nvfp4"), fmt_of("nvfp4-divisor")


def e4m3(*values: float) -> Tensor:
    return torch.tensor(values).to(torch.float8_e4m3fn)


def test_dequantised_by_hand():
    tensors = {
        "packed": torch.tensor([[0x21] * 8 + [0x9F] * 8], dtype=torch.uint8),  # 0.5 1 ...; -6 -0.5 ...
        "scale": e4m3(2.0, 448.0).reshape(1, 2),
        "global_scale": torch.tensor(0.25),
    }
    found = codec.dequantize(MULTIPLIER, tensors, 1, 32)
    assert found.tolist() == [[0.25, 0.5] * 8 + [-672.0, -56.0] * 8]
    found = codec.dequantize(DIVISOR, tensors, 1, 32)
    assert found.tolist() == [[4.0, 8.0] * 8 + [-10752.0, -896.0] * 8]


def test_the_order_of_operations_is_code_times_scale_first():
    # In fp32, (3 * 1.125) / 0.7 and 3 * (1.125 / 0.7) differ.
    tensors = {
        "packed": torch.full((1, 8), 0x55, dtype=torch.uint8),
        "scale": e4m3(1.125).reshape(1, 1),
        "global_scale": torch.tensor(2688 / 1.3),
    }
    code, scale, over = torch.tensor(3.0), torch.tensor(1.125), tensors["global_scale"]
    assert codec.dequantize(DIVISOR, tensors, 1, 16)[0, 0] == (code * scale) / over
    assert codec.dequantize(MULTIPLIER, tensors, 1, 16)[0, 0] == (code * scale) * over


def test_every_e4m3_scale_with_every_code():
    for byte in range(256):
        if byte & 0x7F == 0x7F:
            continue  # NaN
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        value = -size if byte >> 7 else size
        tensors = {
            "packed": torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8),
            "scale": torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e4m3fn),
            "global_scale": torch.tensor(1.0),
        }
        found = codec.dequantize(MULTIPLIER, tensors, 1, 16)
        assert torch.equal(found, decode(torch.arange(16, dtype=torch.uint8)).unsqueeze(0) * value)


def test_c1_gate_and_up_with_unlike_global_scales_stay_apart():
    gate, up = random_weight(32, 64, 1), random_weight(32, 64, 2)
    experts = [[codec.quantize(MULTIPLIER, gate), codec.quantize(MULTIPLIER, up)]]
    experts[0][1]["global_scale"] = 4 * experts[0][0]["global_scale"]
    projection = stack(MULTIPLIER, experts)
    assert projection.tensors["global_scale"].shape == (1, 2)
    for half in (0, 1):
        m = experts[0][half]
        codes = decode(nvfp4.unpack(MULTIPLIER, m, 32, 64))
        exact = (codes * m["scale"].float().repeat_interleave(16, 1)) * m["global_scale"]
        assert torch.equal(codec.dequantize_expert(projection, 0, half), exact)


def test_c4_both_conventions_of_the_same_weights():
    weight = random_weight(16, 64)
    weight[0, 0] = 2.625  # amax; 2688 / amax = 1024 has an exact reciprocal
    weight = weight.clamp(-2.625, 2.625)
    by, over = codec.quantize(MULTIPLIER, weight), codec.quantize(DIVISOR, weight)
    assert float(by["global_scale"]) == 1 / 1024
    assert float(over["global_scale"]) == 1024
    assert torch.equal(by["packed"], over["packed"])
    assert torch.equal(codec.dequantize(MULTIPLIER, by, 16, 64), codec.dequantize(DIVISOR, over, 16, 64))
    # read in the wrong convention, the norm is off by 2^20, which cosine similarity would not show
    wrong = codec.dequantize(DIVISOR, by, 16, 64).norm() / codec.dequantize(DIVISOR, over, 16, 64).norm()
    assert wrong == 2**20


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor"])
@pytest.mark.parametrize("intermediate", [352, 160])
def test_c6_halves_of_352_and_160(name: str, intermediate: int):
    fmt = fmt_of(name)
    for n, k in ((intermediate, 64), (64, intermediate)):
        weight = random_weight(n, k)
        tensors = codec.quantize(fmt, weight)
        codec.check_matrix(fmt, tensors, n, k, "expert")
        assert tensors["packed"].shape == (n, k // 2)
        assert tensors["scale"].shape == (n, k // 16)
        error = (codec.dequantize(fmt, tensors, n, k) - weight).norm() / weight.norm()
        assert error < 0.15


def test_c8_intermediate_80():
    weight = random_weight(48, 80)
    tensors = codec.quantize(MULTIPLIER, weight)
    codec.check_matrix(MULTIPLIER, tensors, 48, 80, "down")
    gate = codec.quantize(MULTIPLIER, weight.T.contiguous())
    codec.check_matrix(MULTIPLIER, gate, 80, 48, "gate")
    assert (codec.dequantize(MULTIPLIER, tensors, 48, 80) - weight).norm() / weight.norm() < 0.15


def test_quantised_by_the_two_level_rules():
    weight = torch.zeros(1, 48)
    weight[0, :16] = torch.tensor([6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2) * 448
    weight[0, 16:32] = -weight[0, :16] / 8
    tensors = codec.quantize(MULTIPLIER, weight)
    assert float(tensors["global_scale"]) == 1.0
    assert tensors["scale"].float().tolist() == [[448.0, 56.0, 0.0]]
    codes = nvfp4.unpack(MULTIPLIER, tensors, 1, 48).tolist()[0]
    assert codes == [7, 6, 6, 4, 4, 2, 2, 0] * 2 + [15, 14, 14, 12, 12, 10, 10, 8] * 2 + [0] * 16


@given(
    name=st.sampled_from(["nvfp4", "nvfp4-divisor"]),
    n=st.integers(1, 9),
    groups=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_scales_follow_the_largest_weight_and_codes_are_nearest(name: str, n: int, groups: int, seed: int):
    fmt = fmt_of(name)
    k = 16 * groups
    weight = random_weight(n, k, seed)
    tensors = codec.quantize(fmt, weight)
    assert torch.equal(nvfp4.pack(fmt, nvfp4.unpack(fmt, tensors, n, k))["packed"], tensors["packed"])
    over = tensors["global_scale"] if fmt.divisor else 1 / tensors["global_scale"]
    scale = tensors["scale"].float()
    largest = weight.abs().reshape(n, groups, 16).amax(-1)
    normal = scale >= 2**-6  # three bits of mantissa
    assert ((scale * 6 / over - largest).abs() <= largest * 0.0626)[normal].all()
    candidates = decode(torch.arange(16, dtype=torch.uint8)) * (scale / over).repeat_interleave(16, 1).unsqueeze(-1)
    nearest = (candidates - weight.unsqueeze(-1)).abs().amin(-1)
    error = (codec.dequantize(fmt, tensors, n, k) - weight).abs()
    torch.testing.assert_close(error, nearest, rtol=1e-5, atol=float(weight.abs().max()) * 1e-6)


def test_all_zero_and_tiny_weights():
    for fmt in (MULTIPLIER, DIVISOR):
        zero = codec.quantize(fmt, torch.zeros(2, 32))
        assert float(zero["global_scale"]) == 1.0
        assert torch.equal(codec.dequantize(fmt, zero, 2, 32), torch.zeros(2, 32))
        tiny = codec.quantize(fmt, torch.full((2, 32), 1e-44))
        codec.check_values(fmt, tiny, "expert")
        assert codec.dequantize(fmt, tiny, 2, 32).abs().max() <= 1e-43


def test_a_global_scale_of_one_element_is_a_scalar():
    tensors = codec.quantize(DIVISOR, random_weight(4, 32))
    listed = {**tensors, "global_scale": tensors["global_scale"].reshape(1)}
    assert torch.equal(codec.dequantize(DIVISOR, listed, 4, 32), codec.dequantize(DIVISOR, tensors, 4, 32))


def test_other_groups_and_odd_sizes_are_refused():
    with pytest.raises(UnsupportedError, match="K = 40; expected K a positive multiple of 16"):
        nvfp4.shapes(MULTIPLIER, 8, 40)
    with pytest.raises(UnsupportedError, match="group_size 32"):
        nvfp4.shapes(WeightFormat("nvfp4", 4, 32), 8, 64)
