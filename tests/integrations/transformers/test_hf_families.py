"""Every family: what transformers saved, in both spellings, gives transformers' own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, edit_config, inputs, make, saved

import fanfold
from fanfold.errors import TensorError, UnsupportedError
from samples import logits, relative_error


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
