"""Tiny random models of every family that runs, made by transformers itself, and adapters made by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

import fanfold
from samples import logits

# What PEFT itself warns of while it wraps a model.
PEFT_WARNS = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*_pattern keys did not match.*:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings=True.*:UserWarning"),
]
VOCABULARY = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
NARROW: dict[str, Any] = {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
EXPERTS: dict[str, Any] = {**NARROW, "num_experts": 6}
LOCAL: dict[str, Any] = {"intermediate_size": 16, "num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {**NARROW, "num_hidden_layers": 3, "n_routed_experts": 8, "first_k_dense_replace": 1}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# name -> (config class, model class, fields beside COMMON; None leaves a common field out)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {**EXPERTS, "head_dim": 8, "num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 8},
    ),
    "cohere2_moe": ("Cohere2MoeConfig", "Cohere2MoeForCausalLM", {**EXPERTS, "intermediate_size": 16, "head_dim": 8}),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**ROUTED, **MLA, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**ROUTED, **MLA, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    ),
    "dots1": (
        "Dots1Config",
        "Dots1ForCausalLM",
        {**ROUTED, "head_dim": 8, "n_shared_experts": 1, "layer_types": ["full_attention"] * 3},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        {**NARROW, "moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        "ExaoneMoeForCausalLM",
        {**EXPERTS, "num_experts": 8, "head_dim": 8, "first_k_dense_replace": 1, "num_shared_experts": 1},
    ),
    "flex_olmo": ("FlexOlmoConfig", "FlexOlmoForCausalLM", {**EXPERTS, "intermediate_size": 16}),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", {**ROUTED, "head_dim": 8, "n_shared_experts": 1}),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        "Glm4MoeLiteForCausalLM",
        {
            **ROUTED,
            **MLA,
            "num_hidden_layers": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**LOCAL, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeForCausalLM", LOCAL),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **LOCAL,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
            "mamba_chunk_size": 8,
        },
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        {**LOCAL, "shared_intermediate_size": 24},
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1Config",
        "HunYuanMoEV1ForCausalLM",
        {"head_dim": 8, "intermediate_size": 16, "num_experts": 6, "moe_topk": 2},
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            "intermediate_size": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        {**EXPERTS, "num_hidden_layers": 3, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        {**NARROW, "head_dim": 8, "n_routed_experts": 6},
    ),
    "minimax": (
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        {**LOCAL, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "block_size": 4},
    ),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM", {**LOCAL, "head_dim": 8}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", LOCAL),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **NARROW,
            "num_hidden_layers": None,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "head_dim": 8,
            "moe_shared_expert_intermediate_size": 24,
            "n_routed_experts": 8,
            "n_group": 1,
            "topk_group": 1,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**EXPERTS, "intermediate_size": 16}),
    "phimoe": ("PhimoeConfig", "PhimoeForCausalLM", LOCAL),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 8}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**EXPERTS, **DELTA_NET, "head_dim": 8, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {**EXPERTS, **DELTA_NET, "head_dim": 8, "shared_expert_intermediate_size": 24},
    ),
    "solar_open": (
        "SolarOpenConfig",
        "SolarOpenForCausalLM",
        {**ROUTED, "num_hidden_layers": 2, "head_dim": 8, "n_shared_experts": 1},
    ),
}
# Families whose experts lie outside transformers' interface, or have another gate.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**LOCAL, "head_dim": 8, "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"intermediate_size": 48, "head_dim": 8}),
}


def make(family: str, **changes: Any) -> Any:
    """The family's model, in fp32 with random weights that let every part show in the logits."""
    config_class, model_class, fields = {**FAMILIES, **OTHERS}[family]
    fields = {name: value for name, value in {**COMMON, **fields, **changes}.items() if value is not None}
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**fields)).eval().float()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.15 * noise if parameter.dim() >= 2 else parameter.data + 0.05 * noise
    for name, buffer in model.named_buffers():
        if "bias" in name:  # the routers' correction
            buffer.data = 0.05 * torch.randn(buffer.shape, generator=generator)
    return model


def inputs(rows: int = 2, length: int = 10) -> Tensor:
    return torch.arange(3, 3 + rows * length).view(rows, length) * 7 % (VOCABULARY - 3) + 3


def saved(family: str, folder: Path, *, original: bool = True, **changes: Any) -> tuple[Path, Tensor]:
    """Saves a model; its folder and its logits of `inputs`."""
    model = make(family, **changes)
    path = folder / family
    model.save_pretrained(path, save_original_format=original)
    return path, logits(model, inputs())


def edit_config(path: Path, **changes: Any) -> None:
    """Changes fields of config.json; None takes a field away."""
    file = path / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def with_peft(
    family: str, folder: Path, modules: list[str], parameters: list[str], **changes: Any
) -> tuple[Any, Tensor]:
    """Our model with an adapter "it" that PEFT made, and PEFT's logits of `inputs(3)`."""
    theirs = make(family, **changes)
    theirs.save_pretrained(folder / "base")
    config = LoraConfig(r=4, lora_alpha=10, target_modules=modules, target_parameters=parameters, lora_dropout=0.0)
    adapted = get_peft_model(theirs, config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapted.eval().save_pretrained(folder / "adapter")
    expected = logits(adapted, inputs(3))
    model = fanfold.load_model(folder / "base", dtype=torch.float32)
    model.adapters.load("it", folder / "adapter")
    return model, expected
