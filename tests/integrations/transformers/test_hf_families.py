"""Every family: what transformers saved, in both spellings, gives transformers' own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import COMMON, EXPERTS, FAMILIES, edit_config, inputs, make, saved

import fanfold
from fanfold.errors import TensorError, UnsupportedError
from fanfold.verification import verify
from samples import logits, numbers, relative_error


@pytest.mark.parametrize("original", [True, False], ids=["as published", "as transformers keeps it"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, original: bool, tmp_path: Path) -> None:
    path, expected = saved(family, tmp_path, original=original)
    model = fanfold.load_model(path, dtype=torch.float32)
    assert relative_error(logits(model, inputs()), expected) <= 1e-6
    assert fanfold.inspect(path)["can_run"]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_experts_matter(family: str, tmp_path: Path) -> None:
    """The logits above would not be the same with other experts."""
    path, expected = saved(family, tmp_path)
    model = fanfold.load_model(path, dtype=torch.float32)
    for site in model.adapter_sites.values():
        if isinstance(site, fanfold.Experts):
            site.weights.down.tensors["weight"].mul_(1.01)
    assert relative_error(logits(model, inputs()), expected) > 1e-4


def test_experts_outside_the_interface_are_refused(tmp_path: Path) -> None:
    path, _ = saved("llama4", tmp_path)
    with pytest.raises(UnsupportedError, match=r"Llama4ForCausalLM: found experts such as .*experts\.down_proj"):
        fanfold.load_model(path)


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    path, _ = saved("qwen3", tmp_path)
    with pytest.raises(UnsupportedError, match="Qwen3ForCausalLM: found no stacked experts"):
        fanfold.load_model(path)
    assert fanfold.inspect(path)["reason"] == "no experts in the checkpoint"


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_are_refused(activation: str, tmp_path: Path) -> None:
    path, _ = saved("qwen3_moe", tmp_path, hidden_act=activation)
    with pytest.raises(UnsupportedError, match="activation of Qwen3MoeExperts"):
        fanfold.load_model(path)
    assert activation in fanfold.inspect(path)["reason"]


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu_pytorch_tanh", "gelu_new"])
def test_activations_under_any_name(activation: str, tmp_path: Path) -> None:
    path, expected = saved("qwen3_moe", tmp_path, hidden_act=activation)
    assert relative_error(logits(fanfold.load_model(path, dtype=torch.float32), inputs()), expected) <= 1e-6


def test_layers_that_transformers_leaves_out_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the next-token predictor behind DeepSeek-V3's last layer; other layers too many are refused."""
    model = make("deepseek_v3", num_hidden_layers=4)
    model.save_pretrained(tmp_path)
    edit_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(TensorError, match=r"model\.layers\.3\."):
        fanfold.load_model(tmp_path)
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3\."])
    model.model.layers = model.model.layers[:3]
    found = logits(fanfold.load_model(tmp_path, dtype=torch.float32), inputs())
    assert relative_error(found, logits(model, inputs())) <= 1e-6


def test_tied_embeddings(tmp_path: Path) -> None:
    path, expected = saved("qwen3_moe", tmp_path, tie_word_embeddings=True)
    model = fanfold.load_model(path, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert relative_error(logits(model, inputs()), expected) <= 1e-6


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "granitemoe", "lfm2_moe", "nemotron_h", "qwen2_moe"])
def test_verify_runs_on_families(family: str, tmp_path: Path) -> None:
    path, _ = saved(family, tmp_path)
    found = verify(path)
    assert found["ok"]
    assert len(found["layers"]) == len(fanfold.inspect(path)["layers"])


@pytest.mark.parametrize("original", [True, False])
def test_a_model_of_text_and_images_given_text(original: bool, tmp_path: Path) -> None:
    text = {**COMMON, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 24}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, "patch_size": 4, "spatial_merge_size": 1, "deepstack_visual_indexes": [0]},
        **{f"{kind}_token_id": 93 + i for i, kind in enumerate(("image", "video", "vision_start", "vision_end"))},
    )
    theirs: Any = transformers.Qwen3VLMoeForConditionalGeneration(config).eval().float()
    for at, parameter in enumerate(theirs.parameters()):
        parameter.data = 0.15 * numbers(*parameter.shape, seed=at)
    theirs.save_pretrained(tmp_path, save_original_format=original)
    model = fanfold.load_model(tmp_path, dtype=torch.float32)
    assert relative_error(logits(model, inputs() % 90), logits(theirs, inputs() % 90)) <= 1e-6
    assert "model.language_model.layers.1.mlp.experts" in model.adapter_sites
