"""Adapters of random weights for a synthetic model, on disk as PEFT writes those of stacked experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor

from fanfold.bench.seeds import generator_of
from fanfold.integrations.transformers.synthetic import SyntheticModel

# PEFT wraps one parameter behind the other: gate_up is the base of down's.
EXPERTS = "base_model.model.model.layers.{}.mlp.experts"
PARAMETERS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def write_adapters(folder: Path, model: SyntheticModel, layers: int, count: int, rank: int) -> dict[str, Path]:
    """Adapters on all experts, whose changes are about half as large as what they change; bf16.

    Args:
        folder: what they are written to.
        model: what they are for.
        layers: of it.
        count: of adapters.
        rank: of each.

    Returns:
        The folder of each by name: `adapter0` and on.
    """
    return {f"adapter{n}": _written(folder / f"adapter{n}", model, layers, rank, seed=n) for n in range(count)}


def _written(folder: Path, model: SyntheticModel, layers: int, rank: int, seed: int) -> Path:
    folder.mkdir()
    sizes = model.experts.experts
    wide = rank * sizes.num_experts
    generator = generator_of("pairs", seed)

    def pair(name: str, n: int, k: int) -> dict[str, Tensor]:
        a = torch.randn(wide, k, generator=generator) * k**-0.5
        b = torch.randn(n, wide, generator=generator) * rank**-0.5
        return {f"{name}.lora_A.weight": a.bfloat16(), f"{name}.lora_B.weight": b.bfloat16()}

    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        name = EXPERTS.format(layer)
        tensors |= pair(f"{name}.base_layer", sizes.halves * sizes.intermediate, sizes.hidden)
        tensors |= pair(name, sizes.hidden, sizes.intermediate)
    cast("Any", safetensors.torch).save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank / 2,
        "target_modules": [],
        "target_parameters": PARAMETERS,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
