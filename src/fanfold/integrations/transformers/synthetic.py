"""Synthetic models: the shapes of a real one, random weights, made on the device; packed experts or the same dense."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fanfold.bench.jobs import LAYERS, LayerShape
from fanfold.bench.seeds import generator_of
from fanfold.bench.weights import random_experts
from fanfold.errors import ArgumentError
from fanfold.formats.codec import dequantize_expert
from fanfold.formats.names import expert_name
from fanfold.integrations.transformers.adapters import attach_adapters
from fanfold.integrations.transformers.places import layer_number
from fanfold.integrations.transformers.quantizer import METHOD, EmptyPlace, modules_of, register
from fanfold.layers.experts import Experts
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights

EMBEDDING = 2.0
"""Standard deviation of embeddings: most of what a layer reads comes from below, as in a trained model. So a near tie
of two experts, which packed and dense weights may decide otherwise, is no other token."""


@dataclass(frozen=True)
class SyntheticModel:
    """A model of random weights.

    Attributes:
        experts: every layer's.
        layers: as many as the real model has.
        config: the other fields of its config.json.
    """

    experts: LayerShape
    layers: int
    config: Mapping[str, Any]

    def fields(self, layers: int) -> dict[str, Any]:
        """config.json, with fewer layers."""
        sizes = self.experts.experts
        own = {
            "hidden_size": sizes.hidden,
            "moe_intermediate_size": sizes.intermediate,
            "num_experts": sizes.num_experts,
            "num_experts_per_tok": self.experts.top_k,
            "num_hidden_layers": layers,
        }
        return {**self.config, **own}


MODELS = {
    # config.json of Qwen/Qwen3-30B-A3B.
    "qwen3-30b": SyntheticModel(
        LAYERS["qwen3-30b"],
        48,
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    )
}


def synthetic(name: str) -> SyntheticModel:
    """The model of that name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in MODELS:
        raise ArgumentError(
            "model",
            found=repr(name),
            expected=f"the folder of a checkpoint, or a model of random weights: {', '.join(MODELS)}",
            next_step="Check the path.",
        )
    return MODELS[name]


def synthetic_model(
    model: SyntheticModel,
    layers: int,
    fmt: WeightFormat,
    experts: str,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Any:
    """A model whose experts are fanfold's, packed in a format, or transformers' own with the same weights dequantised.

    All else is the same for one seed.

    Args:
        model: which.
        layers: how many of its layers.
        fmt: of the experts.
        experts: "fanfold", or an `experts_implementation` of transformers.
        device: where it is made.
        dtype: of activations and all other weights.
        seed: of the weights.

    Raises:
        UnsupportedError: the format can't hold such sizes.
    """
    register()
    fields = model.fields(layers)
    config = cast("Any", AutoConfig).for_model(fields.pop("model_type"), **fields)
    config.quantization_config = {"quant_method": METHOD}
    with torch.device("meta"):
        empty = cast("Any", AutoModelForCausalLM).from_config(config)
    generator = generator_of("hidden", seed, device)
    state = {
        name: _values(name, tensor.shape, generator).to(dtype).cpu()  # where from_pretrained puts them
        for name, tensor in empty.state_dict().items()
        if expert_name(name) is None and ".experts." not in name
    }
    own = {} if experts == "fanfold" else {"experts_implementation": experts}
    loaded = cast("Any", type(empty)).from_pretrained(None, config=config, state_dict=state, dtype=dtype, **own)
    made = cast("PreTrainedModel", loaded.to(device).eval())
    for name, place in modules_of(made):
        if not isinstance(place, EmptyPlace):
            continue
        weights = random_experts(model.experts, fmt, device, seed + layer_number(name))
        if experts == "fanfold":
            made.set_submodule(name, Experts(weights, model.experts.activation, dtype=dtype, path=name))
        else:
            made.set_submodule(name, _dense(place.original[0], weights, device))
    made.requires_grad_(False)
    if experts == "fanfold":
        attach_adapters(made, dtype)
    return made


def _values(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Weights that keep the size of what passes through them."""
    if len(shape) == 1:
        return torch.ones(shape, device=generator.device)
    size = EMBEDDING if "embed" in name else shape[-1] ** -0.5
    return torch.randn(shape, generator=generator, device=generator.device) * size


def _dense(original: nn.Module, weights: ExpertWeights, device: torch.device) -> nn.Module:
    """The experts of transformers, filled with dequantised weights."""
    host = cast("Any", original.to_empty(device=device))
    with torch.no_grad():
        for expert in range(weights.shape.num_experts):
            halves = [dequantize_expert(weights.gate_up, expert, half) for half in range(weights.gate_up.halves)]
            host.gate_up_proj[expert] = torch.cat(halves)
            host.down_proj[expert] = dequantize_expert(weights.down, expert, 0)
    return cast("nn.Module", host)
