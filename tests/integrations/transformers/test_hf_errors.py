"""Bad input to load_model: an error of ours that names what is at fault, and nothing half-made stays."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import edit_config, inputs, saved
from safetensors.torch import load_file, save_file
from torch import Tensor

import fanfold
from fanfold.errors import (
    ArgumentError,
    ConfigError,
    FanfoldError,
    MissingExpertsError,
    MissingFileError,
    TensorError,
    UnavailableError,
    UnsupportedError,
)
from samples import logits, relative_error, sample

FILE = "model.safetensors"


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return shutil.copytree(sample(name), tmp_path / name)

    return copy


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)
    return path


def refused(path: Path, error: type[FanfoldError], text: str, **options: Any) -> FanfoldError:
    with pytest.raises(error, match=text) as caught:
        fanfold.load_model(path, **options)
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize("name", ["base_qwen3moe_tiny_bf16", "gptqmodel_qwen3moe_w4_g32", "ct_qwen3moe_nvfp4"])
def test_a_missing_expert_is_never_random(name: str, copied: Callable[[str], Path]) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "layers.1.mlp.experts.5.up_proj" in key]:
            del tensors[key]

    refused(edit_tensors(copied(name), drop), MissingExpertsError, r"layers\.1\.mlp\.experts: found no 5\.up")


def test_missing_experts_of_a_layer(copied: Callable[[str], Path]) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "layers.1.mlp.experts" in key]:
            del tensors[key]

    path = edit_tensors(copied("gptqmodel_qwen3moe_w4_g32"), drop)
    refused(path, MissingExpertsError, "found no experts for layers 1; expected experts of all 2 expert layers")


@pytest.mark.parametrize(
    "key", ["model.norm.weight", "model.layers.0.mlp.gate.weight", "model.layers.1.self_attn.k_norm.weight"]
)
def test_another_missing_tensor(key: str, copied: Callable[[str], Path]) -> None:
    path = edit_tensors(copied("base_qwen3moe_tiny_bf16"), lambda tensors: tensors.__delitem__(key))
    refused(path, TensorError, f"missing keys: {key}")


def test_a_missing_tensor_of_packed_attention(copied: Callable[[str], Path]) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["model.layers.0.self_attn.q_proj.scales"]

    refused(edit_tensors(copied("gptqmodel_qwen3moe_w4_g32"), drop), TensorError, r"self_attn\.q_proj")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_value_of_packed_attention_is_named(value: float, copied: Callable[[str], Path]) -> None:
    """It is found while transformers takes the weights, which would report it in other words."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.scales"][0, 0] = value

    path = edit_tensors(copied("gptqmodel_qwen3moe_w4_g32"), spoil)
    error = refused(path, TensorError, r"layers\.1\.self_attn\.v_proj")
    assert "transformers" not in str(error)


def test_an_unexpected_tensor(copied: Callable[[str], Path]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.surprise.weight"] = torch.zeros(3)

    path = edit_tensors(copied("base_qwen3moe_tiny_bf16"), add)
    refused(path, TensorError, r"unexpected keys: model\.layers\.0\.self_attn\.surprise\.weight")


def test_experts_of_a_layer_too_many(copied: Callable[[str], Path]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if "layers.1.mlp.experts" in key]:
            tensors[key.replace("layers.1", "layers.2")] = tensors[key].clone()

    path = edit_tensors(copied("base_qwen3moe_tiny_bf16"), add)
    refused(path, TensorError, "found experts of layer 2; expected experts of layers 0, 1 only")


def test_a_bias_that_the_family_does_not_have(copied: Callable[[str], Path]) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if ".experts." in key and "down_proj" in key]:
            tensors[key.replace("weight", "bias")] = torch.zeros(tensors[key].shape[0]).bfloat16()

    path = edit_tensors(copied("base_qwen3moe_tiny_bf16"), add)
    refused(path, TensorError, "biases: down; expected 8 experts, H=128, I=64, with gate, biases: none")


SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"num_experts": 9}, r"gate\.weight \[8, 128\] instead of \[9, 128\]"),
    "fewer experts": ({"num_experts": 7}, r"gate\.weight \[8, 128\] instead of \[7, 128\]"),
    "intermediate": ({"moe_intermediate_size": 32}, "I=64, .*expected 8 experts, H=128, I=32"),
    "hidden": ({"hidden_size": 64}, r"input_layernorm\.weight \[128\] instead of \[64\].* and 13 more"),
    "vocabulary": ({"vocab_size": 100}, r"embed_tokens\.weight \[256, 128\] instead of \[100, 128\]"),
    "layers": ({"num_hidden_layers": 1}, r"unexpected keys: model\.layers\.1"),
    "more layers": ({"num_hidden_layers": 3}, r"missing keys: model\.layers\.2"),
}


@pytest.mark.parametrize("case", SIZES)
def test_config_and_weights_of_different_models(case: str, copied: Callable[[str], Path]) -> None:
    changes, text = SIZES[case]
    path = copied("base_qwen3moe_tiny_bf16")
    edit_config(path, **changes)
    refused(path, TensorError, text)


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown model_type": ({"model_type": "qwen99_moe"}, "from transformers: .*qwen99_moe"),
    "no model_type": ({"model_type": None}, "from transformers"),
    "unknown architecture": ({"architectures": ["Qwen99ForCausalLM"]}, r"architectures: found \['Qwen99ForCausalLM'\]"),
    "no architecture": ({"architectures": None}, "architectures: found None"),
    "empty architectures": ({"architectures": []}, r"architectures: found \[\]"),
    "no model": ({"architectures": ["AutoConfig"]}, r"architectures: found \['AutoConfig'\]"),
    "numbers as text": ({"num_attention_heads": "four"}, "found"),
    "own code": ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, "from transformers"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_transformers_cannot_read(case: str, copied: Callable[[str], Path]) -> None:
    changes, text = CONFIGS[case]
    path = copied("base_qwen3moe_tiny_bf16")
    edit_config(path, **changes)
    refused(path, ConfigError, text)


@pytest.mark.parametrize("content", ["{", "[]", '{"cache_implementation": "nope"}'])
def test_a_generation_config_that_cannot_be_read(content: str, copied: Callable[[str], Path]) -> None:
    path = copied("base_qwen3moe_tiny_bf16")
    (path / "generation_config.json").write_text(content)
    refused(path, ConfigError, r"generation_config\.json: found")


ARGUMENTS: dict[str, tuple[dict[str, Any], type[FanfoldError], str]] = {
    "dtype": ({"dtype": "int8"}, ArgumentError, "dtype: found 'int8'; expected one of bfloat16, float16, float32"),
    "dtype of torch": ({"dtype": torch.float64}, ArgumentError, r"found torch\.float64"),
    "implementation": ({"implementation": "nope"}, ArgumentError, "implementation: found 'nope'; expected one of auto"),
    "device": ({"device": "nope"}, ArgumentError, "device: found 'nope'"),
    "device of another kind": ({"device": "meta"}, ArgumentError, "device: found 'meta'"),
    "no such GPU": ({"device": "cuda:99"}, UnavailableError, r"device cuda:99: found \d+ CUDA devices"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_checked_before_anything_is_read(case: str, copied: Callable[[str], Path]) -> None:
    options, error, text = ARGUMENTS[case]
    path = copied("base_qwen3moe_tiny_bf16")
    if case not in ("dtype", "dtype of torch"):  # the config says the default of this one
        (path / FILE).write_bytes(b"")
    refused(path, error, text, **options)


def test_no_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", MissingFileError, "nothing: found no directory .*; expected a checkpoint directory")
    refused(tmp_path, MissingFileError, r"found no model\.safetensors")


def test_another_error_of_transformers_names_the_checkpoint(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(transformers.Qwen3MoeForCausalLM, "from_pretrained", broken)
    path = copied("base_qwen3moe_tiny_bf16")
    error = refused(path, TensorError, "RuntimeError from transformers: size mismatch")
    assert error.what == str(path)
    assert isinstance(error.__cause__, RuntimeError)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    """After loads, and loads that failed, transformers loads models as it did before; and so does fanfold."""
    path, expected = saved("qwen3_moe", tmp_path)
    plain, plain_expected = saved("qwen3", tmp_path)
    for _ in range(2):
        assert relative_error(logits(fanfold.load_model(path, dtype=torch.float32), inputs()), expected) <= 1e-6
        refused(plain, UnsupportedError, "no stacked experts")
        refused(path, ArgumentError, "dtype", dtype="int8")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert type(theirs.model.layers[0].mlp.experts).__name__ == "Qwen3MoeExperts"
        assert torch.equal(logits(theirs, inputs()), expected)
        normal = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        assert torch.equal(logits(normal, inputs()), plain_expected)
        assert not hasattr(theirs, "adapters")


def test_a_loaded_model_is_not_saved_without_its_experts(tmp_path: Path) -> None:
    model = fanfold.load_model(sample("gptqmodel_qwen3moe_w4_g32"))
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_loaded_model_is_for_inference() -> None:
    model = fanfold.load_model(sample("base_qwen3moe_tiny_bf16"))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert type(model) is transformers.Qwen3MoeForCausalLM
    assert not json.dumps(model.config.to_dict()).count("fanfold-")


def test_loading_says_nothing_but_progress(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fanfold.load_model(sample("ct_qwen3moe_nvfp4"))
    assert caplog.records == []


def test_progress_counts_layers() -> None:
    calls: list[tuple[int, int, str]] = []
    fanfold.load_model(sample("gptqmodel_qwen3moe_w4_g32"), progress=lambda *call: calls.append(call))
    assert calls == [
        (0, 2, "experts of model.layers.0.mlp.experts"),
        (1, 2, "experts of model.layers.1.mlp.experts"),
        (2, 2, "experts"),
    ]
