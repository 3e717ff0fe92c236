"""Adapters written by hand, and places to put them, shared by the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fanfold.spec import ExpertShape, LoraPair

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
TINY = ROOT / "examples" / "tiny-moe"
CPU = torch.device("cpu")
EXPERTS = "model.layers.0.mlp.experts"
QUERY = "model.layers.0.self_attn.q_proj"


def config(**fields: Any) -> dict[str, Any]:
    """The fields of a plain adapter_config.json, some of them replaced."""
    plain = {"peft_type": "LORA", "peft_version": "0.21.2", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    return plain | fields


def names(module: str) -> tuple[str, str]:
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def factors(module: str, rank: int, inputs: int, outputs: int, seed: int = 0) -> dict[str, Tensor]:
    """Random lora_A and lora_B of one module, by their names in a file."""
    g = torch.Generator().manual_seed(seed)
    a, b = names(module)
    return {a: torch.randn(rank, inputs, generator=g), b: torch.randn(outputs, rank, generator=g)}


def write(folder: Path, tensors: Mapping[str, Tensor], **fields: Any) -> Path:
    """An adapter directory."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config(**fields)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


@dataclass
class FakeSite:
    """Keeps what it is given."""

    path: str
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    held: dict[int, Any] = field(default_factory=dict)
    fail: bool = False
    reserved: tuple[int, int] = (0, 0)

    def reserve(self, slots: int, max_rank: int) -> None:
        self.held.clear()
        self.reserved = slots, max_rank

    def unknown_ids(self) -> int:
        return 0

    def put(self, slot: int, pairs: Any) -> None:
        if self.fail:
            raise MemoryError(self.path)
        self.held[slot] = pairs

    def drop(self, slot: int) -> None:
        self.held.pop(slot, None)


@dataclass
class FakeExperts(FakeSite):
    shape: ExpertShape = field(kw_only=True)
    interleaved: bool = False
    transposed: bool = False


@dataclass
class FakeLinear(FakeSite):
    in_features: int = field(kw_only=True)
    out_features: int = field(kw_only=True)

    @property
    def weight(self) -> Tensor:
        return torch.zeros(self.out_features, self.in_features)


def sites(
    layers: int,
    shape: ExpertShape,
    linears: Mapping[str, tuple[int, int]],
    *,
    block: str = "mlp",
    prefix: str = "model.layers",
    gpt_oss: bool = False,
) -> dict[str, FakeSite]:
    """The places of a model: experts, and `linears` (name in the layer -> in, out), in each layer."""
    made: list[FakeSite] = []
    for layer in range(layers):
        path = f"{prefix}.{layer}.{block}.experts"
        made.append(FakeExperts(path, shape=shape, interleaved=gpt_oss, transposed=gpt_oss))
        for name, (inputs, outputs) in linears.items():
            made.append(FakeLinear(f"{prefix}.{layer}.{name}", in_features=inputs, out_features=outputs))
    return {site.path: site for site in made}


def qwen3() -> dict[str, FakeSite]:
    """base_qwen3moe_tiny_bf16."""
    attention = {"q_proj": (128, 128), "k_proj": (128, 64), "v_proj": (128, 64), "o_proj": (128, 128)}
    linears = {f"self_attn.{name}": size for name, size in attention.items()} | {"mlp.gate": (128, 8)}
    return sites(2, ExpertShape(8, 128, 64), linears)


def mixtral() -> dict[str, FakeSite]:
    """base_mixtral_tiny_bf16, in the spelling of transformers v5."""
    return sites(2, ExpertShape(4, 64, 96), {"mlp.gate": (64, 4)})


def gpt_oss() -> dict[str, FakeSite]:
    """base_gptoss_tiny_bf16."""
    return sites(2, ExpertShape(4, 64, 96), {"mlp.router": (64, 4)}, gpt_oss=True)


def tiny() -> dict[str, FakeSite]:
    """The example model."""
    return sites(4, ExpertShape(16, 256, 128), {"mlp.gate": (256, 16)})


def delta(pair: LoraPair) -> Tensor:
    """[N, K], what a pair adds to W."""
    return pair.scale * (pair.b.double() @ pair.a.double())
