"""Dequantised weights of files that other tools wrote, against those tools' numbers, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fanfold.formats.codec import (
    canonical,
    check_matrix,
    check_values,
    codec,
    dequantize,
    dequantize_expert,
    unpack,
)
from fanfold.formats.stack import stack
from fanfold.spec import WeightFormat

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/dequant_layer0_experts01.pt"))
SIZES = {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}


def format_of(config: dict[str, Any]) -> WeightFormat:
    """Just enough of the writers' configs for these folders."""
    q = config["quantization_config"]
    if q["quant_method"] == "gptq" and q["format"] == "gemm":
        return WeightFormat("awq", q["bits"], q["group_size"], symmetric=False)
    if q["quant_method"] == "gptq":
        zero_point = {"gptq": "v1", "gptq_v2": "v2"}[q["checkpoint_format"]]
        return WeightFormat("gptq", q["bits"], q["group_size"], q["sym"], zero_point, q["desc_act"])
    if q["quant_method"] == "awq":
        return WeightFormat("awq", q["bits"], q["group_size"], symmetric=not q.get("zero_point", True))
    if q["quant_method"] == "modelopt":
        algorithm = q["quant_algo"].lower()
        if "nvfp4" in algorithm:
            return WeightFormat("nvfp4", 4, 16)
        if algorithm == "mxfp4":
            return WeightFormat("mxfp4", 4, 32)
        return WeightFormat("fp8", 8, block=(-1, -1))
    w = q["config_groups"]["group_0"]["weights"]
    if q["format"] == "nvfp4-pack-quantized":
        return WeightFormat("nvfp4", 4, 16, divisor=True)
    if q["format"] == "float-quantized":
        block = tuple(w["block_structure"]) if w["strategy"] == "block" else (1, -1)
        return WeightFormat("fp8", 8, block=block)
    assert q["format"] == "pack-quantized"
    return WeightFormat("packed", w["num_bits"], w["group_size"] or -1, w["symmetric"])


def matrix_of(folder: Path, prefix: str, fmt: WeightFormat) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    with safe_open(folder / "model.safetensors", "pt") as file:
        keys = set(file.keys())
        for name, suffixes in codec(fmt.kind).FIELDS.items():
            for suffix in suffixes:
                if f"{prefix}.{suffix}" in keys:
                    tensors[name] = file.get_tensor(f"{prefix}.{suffix}")
    return tensors


def read(folder: Path, fmt: WeightFormat) -> dict[str, dict[str, Tensor]]:
    prefixes = [f"model.layers.0.mlp.experts.{e}.{p}" for e in (0, 1) for p in SIZES]
    return {prefix: matrix_of(folder, prefix, fmt) for prefix in prefixes}


def sizes(prefix: str) -> tuple[int, int]:
    return SIZES[prefix.rpartition(".")[2]]


def test_every_folder_with_numbers_is_here():
    assert len(FOLDERS) == 19


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_dequantised_weights_equal_the_tools_bit_for_bit(folder: Path):
    fmt = format_of(json.loads((folder / "config.json").read_text()))
    expected = torch.load(folder / "dequant_layer0_experts01.pt")
    matrices = read(folder, fmt)
    assert {f"{prefix}.weight" for prefix in matrices} == set(expected)
    for prefix, tensors in matrices.items():
        n, k = sizes(prefix)
        check_matrix(fmt, tensors, n, k, prefix)
        check_values(fmt, tensors, prefix)
        found = dequantize(fmt, tensors, n, k)
        assert found.dtype == torch.float32
        assert torch.equal(found.view(torch.int32), expected[f"{prefix}.weight"].view(torch.int32)), prefix


@pytest.mark.parametrize("folder", [f for f in FOLDERS if "fp8" not in f.name], ids=lambda path: path.name)
def test_packing_gives_the_words_of_the_file_back(folder: Path):
    fmt = format_of(json.loads((folder / "config.json").read_text()))
    for prefix, tensors in read(folder, fmt).items():
        n, k = sizes(prefix)
        module: Any = codec(fmt.kind)
        for name, words in module.pack(fmt, unpack(fmt, tensors, n, k)).items():
            assert torch.equal(words, tensors[name]), prefix
        if fmt.kind in ("gptq", "awq", "packed"):
            zeros = module.unpack_zeros(fmt, tensors, n, k)
            stored = tensors.get("zero_point" if fmt.kind == "packed" else "qzeros")
            if stored is not None:
                assert torch.equal(module.pack_zeros(fmt, zeros), stored), prefix


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_stacked_experts_dequantise_alike(folder: Path):
    fmt = format_of(json.loads((folder / "config.json").read_text()))
    expected = torch.load(folder / "dequant_layer0_experts01.pt")
    matrices = read(folder, fmt)
    prefix = "model.layers.0.mlp.experts"
    experts = [[matrices[f"{prefix}.{e}.{p}_proj"] for p in ("gate", "up")] for e in (0, 1)]
    projection = stack(fmt, experts, 64, 128)
    assert (projection.num_experts, projection.halves) == (2, 2)
    for e in (0, 1):
        for half, p in enumerate(("gate", "up")):
            assert torch.equal(dequantize_expert(projection, e, half), expected[f"{prefix}.{e}.{p}_proj.weight"])
            for name, tensor in canonical(fmt, experts[e][half], 64, 128).items():
                if name in projection.tensors:  # all but a g_idx that says nothing
                    stacked = projection.tensors[name][e, half]
                    assert stacked.dtype == tensor.dtype
                    assert torch.equal(stacked.double(), tensor.double())


def test_b1_v1_and_v2_zeros_of_the_same_weights_dequantise_alike():
    folder = GOLDEN / "gptqmodel_qwen3moe_w4_g32_v2_asym"
    v2 = format_of(json.loads((folder / "config.json").read_text()))
    v1 = WeightFormat("gptq", 4, 32, symmetric=False, zero_point="v1")
    for prefix, tensors in read(folder, v2).items():
        n, k = sizes(prefix)
        stored_minus_one = {**tensors, "qzeros": tensors["qzeros"] - 0x11111111}
        assert torch.equal(dequantize(v1, stored_minus_one, n, k), dequantize(v2, tensors, n, k))
        assert not torch.equal(dequantize(v1, tensors, n, k), dequantize(v2, tensors, n, k))
