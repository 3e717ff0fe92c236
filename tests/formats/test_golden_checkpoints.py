"""Every sample through Checkpoint: against the tools' numbers, the files' bytes, and what its folder says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import same_bits

from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize_expert
from fanfold.formats.names import expert_name
from fanfold.spec.weights import ProjectionWeights

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
FOLDERS = sorted(
    file.parent
    for pattern in (
        "tests/golden/*/config.json",
        "tests/golden/tiny-moe/*/config.json",
        "examples/tiny-moe/*/config.json",
    )
    for file in ROOT.glob(pattern)
)
QWEN, MIXTRAL, GPTOSS, TINY = (2, 8, 128, 64), (2, 4, 64, 96), (2, 4, 64, 96), (4, 16, 256, 128)
# Folder -> method, format of gate_up, format of down, and layers, E, H, I.
EXPECTED: dict[str, tuple[str | None, str, str, tuple[int, int, int, int]]] = {
    "base_gptoss_tiny_bf16": (None, "bf16", "bf16", GPTOSS),
    "base_mixtral_tiny_bf16": (None, "bf16", "bf16", MIXTRAL),
    "base_qwen3moe_tiny_bf16": (None, "bf16", "bf16", QWEN),
    "ct_gptoss_w4a16": ("compressed-tensors", "packed4-g32", "packed4-g32", GPTOSS),
    "ct_mixtral_nvfp4a16": ("compressed-tensors", "nvfp4-divisor", "nvfp4-divisor", MIXTRAL),
    "ct_qwen3moe_fp8_block": ("compressed-tensors", "fp8-block128x128", "fp8-block128x128", QWEN),
    "ct_qwen3moe_fp8_dynamic": ("compressed-tensors", "fp8-channel", "fp8-channel", QWEN),
    "ct_qwen3moe_nvfp4": ("compressed-tensors", "nvfp4-divisor", "nvfp4-divisor", QWEN),
    "ct_qwen3moe_nvfp4a16": ("compressed-tensors", "nvfp4-divisor", "nvfp4-divisor", QWEN),
    "ct_qwen3moe_w4a16_asym": ("compressed-tensors", "packed4-g32-asym", "packed4-g32-asym", QWEN),
    "ct_qwen3moe_w4a16_gptq": ("compressed-tensors", "packed4-g32", "packed4-g32", QWEN),
    "ct_qwen3moe_w4a16_gptq_actorder_weight": ("compressed-tensors", "packed4-g32", "packed4-g32", QWEN),
    "ct_qwen3moe_w8a16": ("compressed-tensors", "packed8-channel", "packed8-channel", QWEN),
    "gptqmodel_mixtral_w4_g32": ("gptq", "gptq4-g32-v1", "gptq4-g32-v1", MIXTRAL),
    "gptqmodel_qwen3moe_awq_gemm_g32": ("awq", "awq4-g32-asym", "awq4-g32-asym", QWEN),
    "gptqmodel_qwen3moe_w2_g32": ("gptq", "gptq2-g32-v1", "gptq2-g32-v1", QWEN),
    "gptqmodel_qwen3moe_w4_g32": ("gptq", "gptq4-g32-v1", "gptq4-g32-v1", QWEN),
    "gptqmodel_qwen3moe_w4_g32_descact": ("gptq", "gptq4-g32-v1-actorder", "gptq4-g32-v1-actorder", QWEN),
    "gptqmodel_qwen3moe_w4_g32_v2_asym": ("gptq", "gptq4-g32-asym-v2", "gptq4-g32-asym-v2", QWEN),
    "gptqmodel_qwen3moe_w8_gm1": ("gptq", "gptq8-channel-v1", "gptq8-channel-v1", QWEN),
    "modelopt_qwen3moe_fp8": ("modelopt", "fp8-tensor", "fp8-tensor", QWEN),
    "modelopt_qwen3moe_fp8_pb": ("modelopt", "fp8-block128x128", "fp8-block128x128", QWEN),
    "modelopt_qwen3moe_mxfp4": ("modelopt", "mxfp4", "mxfp4", QWEN),
    "modelopt_qwen3moe_nvfp4": ("modelopt", "nvfp4", "nvfp4", QWEN),
    "modelopt_qwen3moe_w4a16_nvfp4": ("modelopt", "nvfp4", "nvfp4", QWEN),
    "native_gptoss_mxfp4": ("mxfp4", "mxfp4", "mxfp4", GPTOSS),
    "base": (None, "bf16", "bf16", TINY),
    "gptq-int4-actorder": ("gptq", "gptq4-g64-asym-v1-actorder", "gptq4-g64-asym-v1-actorder", TINY),
    "gptq-int4": ("gptq", "gptq4-g128-v1", "gptq4-g128-v1", TINY),
    "nvfp4": ("compressed-tensors", "nvfp4-divisor", "nvfp4-divisor", TINY),
}
every_sample = pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)


def test_every_sample_is_here():
    assert {folder.name for folder in FOLDERS} == set(EXPECTED)


@every_sample
def test_formats_and_sizes(folder: Path):
    method, gate_up, down, (layers, experts, hidden, intermediate) = EXPECTED[folder.name]
    checkpoint = Checkpoint(folder)
    assert checkpoint.quantization.method == method
    assert list(checkpoint.layers) == list(range(layers))
    assert checkpoint.config.activation.kind == ("clamped_swiglu" if "gptoss" in folder.name else "silu")
    for layer in checkpoint.layers:
        described, read = checkpoint.describe(layer), checkpoint.read_experts(layer)
        assert (described["gate_up"].format.name, described["down"].format.name) == (gate_up, down)
        assert (read.gate_up.format.name, read.down.format.name) == (gate_up, down)
        assert (read.gate_up.num_experts, read.gate_up.halves) == (experts, 2)
        assert (read.gate_up.n, read.gate_up.k) == (intermediate, hidden)
        assert (read.down.num_experts, read.down.halves, read.down.n, read.down.k) == (experts, 1, hidden, intermediate)
        assert (read.gate_up.bias is not None) == (read.down.bias is not None) == ("gptoss" in folder.name)


@every_sample
def test_resident_bytes_are_at_most_those_on_disk(folder: Path):
    checkpoint = Checkpoint(folder)
    resident = sum(checkpoint.read_experts(layer).nbytes for layer in checkpoint.layers)
    assert 0.8 * checkpoint.expert_bytes() < resident <= 1.02 * checkpoint.expert_bytes()
    tensors = load_file(folder / "model.safetensors")
    assert checkpoint.expert_bytes() == sum(t.nbytes for name, t in tensors.items() if expert_name(name) is not None)


@pytest.mark.parametrize(
    "folder", [f for f in FOLDERS if (f / "dequant_layer0_experts01.pt").exists()], ids=lambda p: p.name
)
def test_dequantised_experts_equal_the_tools_bit_for_bit(folder: Path):
    expected = torch.load(folder / "dequant_layer0_experts01.pt")
    assert len(expected) == 6
    experts = Checkpoint(folder).read_experts(0)
    for name, weight in expected.items():
        parsed = expert_name(name)
        assert parsed is not None
        assert parsed.expert in (0, 1)
        projection, half = (experts.down, 0) if parsed.projection == "down" else (experts.gate_up, 0)
        half = 1 if parsed.projection == "up" else half
        assert same_bits(dequantize_expert(projection, parsed.expert, half), weight), name


def rows(projection: ProjectionWeights) -> list[tuple[int, int]]:
    return [(e, p) for e in range(projection.num_experts) for p in range(projection.halves)]


@every_sample
def test_stacks_hold_the_files_tensors(folder: Path):
    """Each stacked tensor is one of the file's; for fused ones the halves put together are."""
    checkpoint = Checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, names in checkpoint.layers.items():
        experts = checkpoint.read_experts(layer)
        for projection, halves in ((experts.gate_up, ("gate", "up")), (experts.down, ("down",))):
            for field, stack in projection.tensors.items():
                for e, p in rows(projection):
                    suffixes = names.per_expert.get((halves[p], e))
                    if suffixes is None:
                        continue
                    stored = [tensors[name].reshape(-1) for name in suffixes.values()]
                    assert any(same_bits(stack[e, p].reshape(-1), tensor) for tensor in stored), (field, e, p)
    if "gptoss" in folder.name and checkpoint.layers[0].fused:
        gate_up = checkpoint.read_experts(0).gate_up
        prefix = "model.layers.0.mlp.experts.gate_up_proj"
        if gate_up.format.name == "mxfp4":
            stored = tensors[f"{prefix}_blocks"].flatten(2)
            assert same_bits(gate_up.tensors["packed"].transpose(1, 2).flatten(1, 2), stored)
        else:
            assert same_bits(gate_up.tensors["weight"].transpose(1, 2).flatten(1, 2).transpose(1, 2), tensors[prefix])
        assert gate_up.bias is not None
        assert same_bits(gate_up.bias.transpose(1, 2).flatten(1), tensors[f"{prefix}_bias"])


@every_sample
def test_packed_modules_outside_the_experts_are_read(folder: Path):
    checkpoint = Checkpoint(folder)
    attention = [module for module in checkpoint.packed if "self_attn" in module]
    assert set(checkpoint.packed) == set(attention)
    quantised_attention = checkpoint.quantization.method not in (None, "mxfp4")
    assert len(attention) == (4 * len(checkpoint.layers) if quantised_attention else 0)
    for module in attention:
        matrix = checkpoint.linear(module)
        weight = checkpoint.read_linear(module, torch.float32)
        assert weight.shape == (matrix.n, matrix.k)
        assert bool(torch.isfinite(weight).all())
    everything = {*checkpoint.plain, *(n for s in checkpoint.packed.values() for n in s.values())}
    everything |= {name for tensors in checkpoint.layers.values() for name in tensors.names()}
    assert everything == set(checkpoint.files.infos)
    assert checkpoint.draft == []


def test_attention_of_every_tool_is_near_the_base():
    """Packed attention weights are those of the base but for their rounding."""
    base = Checkpoint(GOLDEN / "base_qwen3moe_tiny_bf16")
    limits = {"w2": 0.6, "w4": 0.2, "nvfp4": 0.2, "mxfp4": 0.2, "awq": 0.2, "w8": 0.02, "fp8": 0.05}
    for folder in FOLDERS:
        if "qwen3moe" not in folder.name or folder.name.startswith("base"):
            continue
        limit = next(value for key, value in limits.items() if f"_{key}" in folder.name)
        checkpoint = Checkpoint(folder)
        for module in checkpoint.packed:
            weight, expected = (
                checkpoint.read_linear(module, torch.float32),
                base.files.read(f"{module}.weight").float(),
            )
            error = float((weight - expected).norm() / expected.norm())
            assert 0 < error < limit, (folder.name, module, error)
