"""What is written, against compressed-tensors' own compressors and decompressors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams
from quantized import GPT_OSS, QWEN, TARGETS, decompressed, dense, tensors_of
from torch import Tensor

from fanfold.formats.codec import dequantize
from fanfold.quantization.pack import named, pack
from fanfold.quantization.quantize import quantize
from fanfold.quantization.target import target_of
from samples import numbers, sample

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("base", [QWEN, GPT_OSS])
@pytest.mark.parametrize("name", TARGETS)
def test_its_decompressor_reads_what_we_read(tmp_path: Path, name: str, base: str) -> None:
    quantize(sample(base), tmp_path / "out", name, **TARGETS[name])
    theirs = decompressed(tmp_path / "out")
    for layer in range(2):
        gate_up, down = dense(tmp_path / "out", layer)
        for e in range(len(down)):
            for projection, weight in (("gate", gate_up[e, 0]), ("up", gate_up[e, 1]), ("down", down[e])):
                found = theirs[f"model.layers.{layer}.mlp.experts.{e}.{projection}_proj"]
                if name == "nvfp4":  # it divides in bf16, in two roundings
                    assert torch.allclose(found.float(), weight, rtol=2**-7, atol=0)
                else:
                    assert torch.equal(found, weight.to(found.dtype))


def scheme_of(name: str) -> Any:
    config = target_of(name, TARGETS[name].get("group_size")).config([])
    return QuantizationConfig.model_validate(config).config_groups["group_0"]


def weights(dtype: torch.dtype) -> Tensor:
    """Gate and up, one of them four times the other; a row of zeros, and one far larger."""
    weight = 0.05 * numbers(2, 16, 96)
    weight[1] *= 4
    weight[0, 3] = 0
    weight[1, 5, ::7] *= 10
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_scales_are_its_own_and_codes_what_it_makes_of_them(name: str, dtype: torch.dtype) -> None:
    target, scheme, weight = target_of(name, TARGETS[name].get("group_size")), scheme_of(name), weights(dtype)
    for half, tensors in zip(weight, pack(target, weight), strict=True):
        groups = half.reshape(len(half), -1, 32 if name == "int4" else 96)
        expected, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        live = groups.abs().amax(-1) > 0  # where all is 0 it stores a small number, and we 1
        assert tensors["scale"].dtype == expected.dtype == dtype
        assert torch.equal(tensors["scale"][live], expected[live])
        state = {"weight": half.float(), "weight_scale": tensors["scale"].float()}
        written = BaseCompressor.get_value_from_registry(scheme.format).compress(state, scheme)
        ours = named(target, "m", tensors, *half.shape)
        code = "weight_packed" if name == "int4" else "weight"
        assert torch.equal(ours[f"m.{code}"].float(), written[code].float())
        if name == "int4":
            assert ours["m.weight_shape"].tolist() == written["weight_shape"].tolist() == [16, 96]


def test_mxfp4_codes_are_what_it_makes_of_the_scales() -> None:
    target, scheme, weight = target_of("mxfp4"), scheme_of("mxfp4"), weights(torch.bfloat16)
    for half, tensors in zip(weight, pack(target, weight), strict=True):
        scale = 2.0 ** (tensors["scale"].float() - 127)
        state = {"weight": half.float(), "weight_scale": scale}
        written = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized").compress(state, scheme)
        assert torch.equal(tensors["packed"], written["weight_packed"])
        assert torch.equal(tensors["scale"], written["weight_scale"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_and_up_share_a_global_scale(dtype: torch.dtype) -> None:
    weight = weights(dtype)
    gate, up = pack(target_of("nvfp4"), weight)
    assert float(gate["global_scale"]) == float(up["global_scale"])
    assert float(gate["global_scale"]) == pytest.approx(2688 / float(weight.abs().max()), rel=1e-6)
    for half, tensors in zip(weight, (gate, up), strict=True):
        decoded = dequantize(target_of("nvfp4").format, tensors, 16, 96)
        assert float((decoded - half.float()).norm() / half.float().norm()) < 0.12
    assert named(target_of("nvfp4"), "m", gate, 16, 96)["m.weight_global_scale"].shape == (1,)


def test_experts_and_projections_have_global_scales_of_their_own(tmp_path: Path) -> None:
    quantize(sample(QWEN), tmp_path / "out", "nvfp4")
    base = tensors_of(sample(QWEN))
    found = tensors_of(tmp_path / "out")
    for e in range(8):
        module = f"model.layers.1.mlp.experts.{e}"
        largest = {p: float(base[f"{module}.{p}_proj.weight"].abs().max()) for p in ("gate", "up", "down")}
        largest["gate"] = largest["up"] = max(largest["gate"], largest["up"])
        for projection, amax in largest.items():
            scale = found[f"{module}.{projection}_proj.weight_global_scale"]
            assert float(scale) == pytest.approx(2688 / amax, rel=1e-6)
