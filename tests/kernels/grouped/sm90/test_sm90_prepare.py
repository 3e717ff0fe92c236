"""The prepared form of every format against formats.codec.dequantize, bit for bit; what is refused, by name."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from sm90_jobs import FP4, INTEGERS, integers, projection, unpacked, with_bias
from torch import Tensor

from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.grouped.sm90 import prepare as prepare_module
from fanfold.kernels.grouped.sm90.prepare import prepare
from fanfold.spec import ProjectionWeights
from samples import random_projection, sample


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("name", [*INTEGERS, *FP4])
def test_c1_weights_are_those_of_the_file(name: str, halves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "AT_ONCE", 2 * halves * 64 * 128)  # two experts at once, then one
    for n, k in ((64, 128), (192, 256)):
        weights = projection(name, 3, halves, n, k, seed=n)
        made = prepare(weights)
        assert (made.n, made.k, made.num_experts) == (n, k, 3)
        assert (made.rows, made.padded_k) == (-(-n * halves // 128) * 128, k)
        for e in range(3):
            values, scales = unpacked(made, e)
            for half in range(halves):
                expected = dequantize_expert(weights, e, half)
                found = values[half] * scales[half]
                if name in ("nvfp4", "nvfp4-divisor"):
                    stored = weights.tensors["global_scale"][e, half]
                    assert made.global_scale is not None
                    factor = made.global_scale[e, half]
                    assert factor == (1.0 / stored if name == "nvfp4-divisor" else stored)
                    found = found / stored if name == "nvfp4-divisor" else found * factor
                assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("name", ["gptq4-g64-asym-v1", "gptq4-g64-asym-v2", "awq4-g64-asym", "packed4-g64-asym"])
def test_b25_every_zero_point_beside_every_other(name: str) -> None:
    """Zeros of 0 borrow from the next field in v1 words; all pairs of neighbours occur."""
    weights = integers(name, 2, 1, 1024, 256)
    made = prepare(weights)
    assert made.zeros is not None
    seen = made.zeros[0].flatten(0, 1)
    assert len({(a, b) for row in seen for a, b in pairwise(row.tolist())}) == 256
    values, scales = unpacked(made, 1)
    assert torch.equal(values[0] * scales[0], dequantize_expert(weights, 1, 0))


def test_scales_that_bf16_holds_are_short() -> None:
    """Every scale counts, those of the other half and of the last expert too; compressed-tensors stores such."""
    assert prepare(projection("packed4-g64", 3, 2, 64, 128)).short_scales
    weights = integers("gptq4-g64", 3, 2, 64, 128, exact=True)
    assert prepare(weights).short_scales
    weights.tensors["scales"][2, 1, 1, 63] = 1.0 + 2.0**-8
    assert not prepare(weights).short_scales
    assert not prepare(projection("nvfp4", 3, 2, 64, 128)).short_scales


def test_mxfp4_has_no_scale_of_a_matrix() -> None:
    made = prepare(projection("mxfp4", 2, 2, 64, 64))
    assert made.global_scale is not None
    assert torch.equal(made.global_scale, torch.ones(2, 2))


@pytest.mark.parametrize(
    "name", ["gptqmodel_qwen3moe_w4_g32", "gptqmodel_qwen3moe_awq_gemm_g32", "ct_qwen3moe_nvfp4a16"]
)
def test_files_of_other_tools(name: str) -> None:
    import fanfold

    weights = fanfold.load_experts(sample(name), layer=0).weights
    for packed in (weights.gate_up, weights.down):
        if packed.n * packed.halves % 64 or packed.k % 64:
            with pytest.raises(UnsupportedError, match="multiples of 64"):
                prepare(packed)
            continue
        values, scales = unpacked(prepare(packed), 1)
        stored = packed.tensors.get("global_scale")
        for half in range(packed.halves):
            found = values[half] * scales[half]
            if stored is not None:
                found = found / stored[1, half] if packed.format.divisor else found * stored[1, half]
            assert torch.equal(found, dequantize_expert(packed, 1, half))


def test_codes_under_a_scale_of_zero_are_zero() -> None:
    """The kernel's scales have no zero, and every subnormal one."""
    weights = projection("nvfp4", 1, 2, 64, 128)
    stored = torch.arange(2 * 64 * 8).reshape(1, 2, 64, 8) % 12
    weights = changed(weights, "scale", stored.to(torch.uint8).view(torch.float8_e4m3fn))
    values, scales = unpacked(prepare(weights), 0)
    for half in range(2):
        found = values[half] * scales[half] * weights.tensors["global_scale"][0, half]
        assert torch.equal(found, dequantize_expert(weights, 0, half))


@pytest.mark.parametrize("name", ["gptq4-g32-asym-v1", "gptq4-g64", "packed4-g64-asym", "nvfp4", "mxfp4"])
def test_odd_tiles_are_padded_with_zeros(name: str) -> None:
    """gpt-oss has 2880 = 45 * 64; `unpacked` looks at the padding."""
    weights = projection(name, 2, 1, 192, 192)
    made = prepare(weights)
    assert (made.rows, made.padded_k) == (256, 256)
    values, scales = unpacked(made, 1)
    found = values[0] * scales[0]
    if name == "nvfp4":
        found = found * weights.tensors["global_scale"][1, 0]
    assert torch.equal(found, dequantize_expert(weights, 1, 0))


def test_a_bias_is_kept_in_fp32() -> None:
    weights = with_bias(projection("mxfp4", 2, 2, 64, 128))
    made = prepare(weights)
    assert made.bias is not None
    assert weights.bias is not None
    assert torch.equal(made.bias, weights.bias.float())


REFUSED = {
    "gptq4-g64-actorder": "act_order; expected both projections together.*prepare_layer",
    "gptq8-g64": "runs 4-bit gptq, awq and packed",
    "gptq4-channel": "group_size -1",
    "bf16": "runs 4-bit gptq, awq and packed",
    "fp8-tensor": "runs 4-bit gptq, awq and packed",
}


@pytest.mark.parametrize("name", REFUSED)
def test_formats_that_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=REFUSED[name]):
        prepare(random_projection(name, 1, 1, 64, 128))


def test_sizes_that_are_refused() -> None:
    for n, k in ((48, 128), (64, 96)):
        with pytest.raises(UnsupportedError, match="multiples of 64"):
            prepare(random_projection("gptq4-g32", 1, 1, n, k))


def changed(weights: ProjectionWeights, name: str, value: Tensor) -> ProjectionWeights:
    return replace(weights, tensors={**weights.tensors, name: value})


def test_scales_that_would_be_read_wrong_are_refused() -> None:
    weights = projection("packed4-g64", 1, 1, 64, 64)
    scale = weights.tensors["scale"].clone()
    scale[0, 0, 3] = 2.0**-30
    with pytest.raises(UnsupportedError, match="1 that float16 does not hold, the first 9"):
        prepare(changed(weights, "scale", scale))
    nvfp4 = projection("nvfp4", 1, 1, 64, 64)
    stored = nvfp4.tensors["scale"].view(torch.uint8).clone()
    for byte in (0x7F, 0x80, 0xB8):
        stored[0, 0, 5, 1] = byte
        with pytest.raises(UnsupportedError, match=f"1 bytes over 126, the first {byte}"):
            prepare(changed(nvfp4, "scale", stored.view(torch.float8_e4m3fn)))
    mxfp4 = projection("mxfp4", 1, 1, 64, 64)
    stored = mxfp4.tensors["scale"].clone()
    stored[0, 0, 5, 1] = 137
    with pytest.raises(UnsupportedError, match="1 bytes over 136, the first 137"):
        prepare(changed(mxfp4, "scale", stored))


def test_a_tensor_unlike_its_format() -> None:
    weights = projection("gptq4-g64", 2, 2, 64, 128)
    with pytest.raises(ArgumentError, match="qweight"):
        prepare(changed(weights, "qweight", weights.tensors["qweight"][..., :-1].contiguous()))


def test_no_experts() -> None:
    weights = projection("gptq4-g64-asym-v1", 1, 2, 64, 64)
    none = replace(weights, tensors={name: tensor[:0] for name, tensor in weights.tensors.items()})
    assert prepare(none).words.shape == (0, 2, 2, 512)
