"""Small checkpoints to quantise, and how compressed-tensors reads the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize_expert
from samples import numbers

QWEN, MIXTRAL, GPT_OSS = "base_qwen3moe_tiny_bf16", "base_mixtral_tiny_bf16", "base_gptoss_tiny_bf16"
# Every target, with a group that divides the sizes of all the bases.
TARGETS: dict[str, dict[str, Any]] = {"nvfp4": {}, "mxfp4": {}, "int4": {"group_size": 32}, "fp8": {}}
E, H, N = 3, 64, 32


def write(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    model = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": H, "num_experts": E, **config}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def per_expert(container: str = "model.layers.0.mlp.experts", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """One Linear an expert, and a norm beside them."""
    tensors = {"model.norm.weight": numbers(H, seed=99, dtype=dtype)}
    for e in range(E):
        for at, (name, shape) in enumerate({"gate_proj": (N, H), "up_proj": (N, H), "down_proj": (H, N)}.items()):
            tensors[f"{container}.{e}.{name}.weight"] = numbers(*shape, seed=10 * e + at, dtype=dtype)
    return tensors


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors, over all shards, as safetensors' own reader has them."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def dense(folder: Path, layer: int = 0) -> tuple[Tensor, Tensor]:
    """Our own reading: fp32 [E, P, N, K] of gate_up and [E, H, I] of down."""
    experts = Checkpoint(folder).read_experts(layer)
    both = [
        torch.stack([torch.stack([dequantize_expert(w, e, p) for p in range(w.halves)]) for e in range(w.num_experts)])
        for w in (experts.gate_up, experts.down)
    ]
    return both[0], both[1][:, 0]


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def decompressed(folder: Path) -> dict[str, Tensor]:
    """Module of an expert -> its weight, as compressed-tensors decompresses it by the config."""
    config = QuantizationConfig.model_validate(config_of(folder))
    scheme = config.config_groups["group_0"]
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors_of(folder).items():
        module, _, suffix = name.rpartition(".")
        if ".experts." in module and suffix != "bias":
            modules.setdefault(module, {})[suffix] = tensor
    return {module: compressor.decompress(state, scheme)["weight"] for module, state in modules.items()}
