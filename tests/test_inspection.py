"""inspect: what is there, exactly, and why something can't run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from fanfold import inspect
from fanfold.errors import CorruptFileError, MissingFileError
from samples import EXAMPLE, GOLDEN, sample


def test_a_gptq_checkpoint_exactly() -> None:
    path = sample("gptqmodel_qwen3moe_w4_g32_descact")
    up = {
        "format": "gptq4-g32-v1-actorder",
        "kind": "gptq",
        "bits": 4,
        "group_size": 32,
        "symmetric": True,
        "zero_point": "v1",
        "act_order": True,
        "block": None,
        "activations": "plain",
        "shape": [8, 64, 128],
    }
    found = inspect(path)
    sizes = found.pop("bytes")
    attention = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "kqvo"]
    assert found == {
        "kind": "checkpoint",
        "path": str(path),
        "can_run": True,
        "reason": None,
        "model_type": "qwen3_moe",
        "quantization": "gptq",
        "warnings": [],
        "layers": [{"layer": layer, "gate_up": up, "down": {**up, "shape": [8, 128, 64]}} for layer in range(2)],
        "packed": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
        "unpacked": [{"module": module, "format": "gptq4-g32-v1"} for module in sorted(attention)],
        "experts": {
            "layers": 2,
            "num_experts": 8,
            "hidden": 128,
            "intermediate": 64,
            "gated": True,
            "activation": "silu",
        },
    }
    tensors = load_file(path / "model.safetensors")
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    assert sizes == {
        "experts": experts,
        "experts_bf16": 2 * 2 * 8 * 3 * 128 * 64,
        "other": sum(tensor.nbytes for tensor in tensors.values()) - experts,
    }


def test_a_gpt_oss_checkpoint_exactly() -> None:
    path = sample("native_gptoss_mxfp4")
    up = {
        "format": "mxfp4",
        "kind": "mxfp4",
        "bits": 4,
        "group_size": 32,
        "symmetric": True,
        "zero_point": None,
        "act_order": False,
        "block": None,
        "activations": "plain",
        "shape": [4, 96, 64],
    }
    weights = 4 * 3 * 96 * 64  # of a layer
    found = inspect(path)
    assert found == {
        "kind": "checkpoint",
        "path": str(path),
        "can_run": True,
        "reason": None,
        "model_type": "gpt_oss",
        "quantization": "mxfp4",
        "warnings": [],
        "layers": [{"layer": layer, "gate_up": up, "down": {**up, "shape": [4, 64, 96]}} for layer in range(2)],
        "packed": ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"],
        "unpacked": [],
        "experts": {
            "layers": 2,
            "num_experts": 4,
            "hidden": 64,
            "intermediate": 96,
            "gated": True,
            "activation": "clamped_swiglu",
        },
        "bytes": {
            # codes, a scale for 32, and biases in bf16
            "experts": 2 * (weights // 2 + weights // 32 + 2 * 4 * (192 + 64)),
            "experts_bf16": 2 * 2 * weights,
            "other": found["bytes"]["other"],
        },
    }


@pytest.mark.parametrize(
    ("name", "block"),
    [("ct_qwen3moe_fp8_block", [128, 128]), ("ct_qwen3moe_fp8_dynamic", [1, -1]), ("modelopt_qwen3moe_fp8", [-1, -1])],
)
def test_blocks_of_fp8(name: str, block: list[int]) -> None:
    assert inspect(sample(name))["layers"][0]["down"]["block"] == block


def test_an_adapter_exactly() -> None:
    path = sample("peft_qwen3moe_all_linear")
    file = load_file(path / "adapter_model.safetensors")
    found = inspect(path)
    config = json.loads((path / "adapter_config.json").read_text())
    assert found == {
        "kind": "adapter",
        "path": str(path),
        "can_run": True,
        "reason": None,
        "peft_version": config["peft_version"],
        "ranks": [config["r"], 2 * config["r"]],  # gate and up in one: PEFT doubles it
        "targets": found["targets"],
        "layers": [0, 1],
        "bytes": sum(tensor.nbytes for tensor in file.values()),
    }
    assert sum(found["targets"].values()) == len(file) // 2
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= set(found["targets"])


def test_targets_and_ranks_of_adapters() -> None:
    scripture = inspect(EXAMPLE / "adapter-scripture")
    assert scripture["targets"] == {"experts.down (fused)": 4, "experts.gate_up (fused)": 4}
    assert (scripture["ranks"], scripture["layers"]) == ([16], [0, 1, 2, 3])
    python = inspect(EXAMPLE / "adapter-python")
    assert python["targets"] == {"experts.down": 64, "experts.gate": 64, "experts.up": 64}
    patterns = inspect(sample("peft_v4_qwen3moe_per_expert_rslora_patterns"))
    assert len(patterns["ranks"]) > 1


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/*config.json")), ids=lambda path: path.parent.name)
def test_every_sample_is_plain_data_and_runs(path: Path) -> None:
    found = inspect(path.parent)
    assert json.loads(json.dumps(found)) == found
    assert found["can_run"] == ("dora" not in path.parent.name)


@pytest.fixture
def copied(tmp_path: Path) -> Any:
    def copy(name: str, file: str = "config.json", **fields: Any) -> Path:
        path = shutil.copytree(sample(name), tmp_path / name)
        config = json.loads((path / file).read_text())
        quantization = fields.pop("quantization", None)
        if quantization is not None:
            config["quantization_config"].update(quantization)
        (path / file).write_text(json.dumps({**config, **fields}))
        return path

    return copy


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bits": ("ct_qwen3moe_w4a16_gptq", {}, "5"),
    "method": ("base_qwen3moe_tiny_bf16", {"quantization_config": {"quant_method": "exotic"}}, "found 'exotic'"),
    "activation": ("base_qwen3moe_tiny_bf16", {"hidden_act": "relu"}, "relu"),
    "experts": ("base_qwen3moe_tiny_bf16", {"num_experts": 9}, r"no 8\.gate"),
    "sizes": ("base_qwen3moe_tiny_bf16", {"num_experts": 4, "num_local_experts": 8}, "num_local_experts = 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_says_why(case: str, copied: Any) -> None:
    name, fields, text = REFUSED[case]
    path = copied(name, **fields)
    if case == "bits":
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 5
        (path / "config.json").write_text(json.dumps(config))
    found = inspect(path)
    assert found["can_run"] is False
    assert re.search(text, found["reason"])
    assert (found["kind"], found["path"]) == ("checkpoint", str(path))


def test_a_missing_expert_and_no_experts(tmp_path: Path) -> None:
    path = shutil.copytree(sample("base_qwen3moe_tiny_bf16"), tmp_path / "it")
    tensors = load_file(path / "model.safetensors")
    save_file({k: t for k, t in tensors.items() if "experts.3.down" not in k}, path / "model.safetensors")
    found = inspect(path)
    assert (found["can_run"], "found no 3.down" in found["reason"]) == (False, True)
    save_file({k: t for k, t in tensors.items() if "experts" not in k}, path / "model.safetensors")
    found = inspect(path)
    assert (found["can_run"], found["reason"]) == (False, "no experts in the checkpoint")


def test_an_adapter_of_dora_is_refused() -> None:
    found = inspect(sample("peft_v4_qwen3moe_per_expert_dora"))
    assert found["can_run"] is False
    assert "DoRA" in found["reason"]


def test_a_label_that_does_not_fit_is_a_warning(copied: Any) -> None:
    path = copied("gptqmodel_qwen3moe_w4_g32_v2_asym", quantization={"checkpoint_format": "gptq", "format": "gptq"})
    (path / "quantize_config.json").unlink()
    found = inspect(path)
    assert found["can_run"]
    (warning,) = found["warnings"]
    assert "set checkpoint_format to gptq_v2" in warning


def test_what_is_neither(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"no config\.json and no adapter_config\.json"):
        inspect(tmp_path)
    with pytest.raises(MissingFileError, match="no such directory"):
        inspect(tmp_path / "nothing")
    with pytest.raises(MissingFileError, match="no such directory"):
        inspect(sample("base_qwen3moe_tiny_bf16") / "config.json")


@pytest.mark.parametrize("name", ["base_qwen3moe_tiny_bf16", "peft_qwen3moe_all_linear"])
def test_files_that_cannot_be_read_are_errors(name: str, tmp_path: Path) -> None:
    path = shutil.copytree(sample(name), tmp_path / name)
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(CorruptFileError):
        inspect(path)
    weights.unlink()
    with pytest.raises(MissingFileError):
        inspect(path)
