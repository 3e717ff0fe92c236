from __future__ import annotations

from typing import Any

import pytest
from small_checkpoints import parts

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.formats.config import ModelConfig
from fanfold.spec import Activation


def config(**fields: Any) -> ModelConfig:
    return ModelConfig.of("config.json", fields)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"])
def test_number_of_experts_under_every_name(name: str):
    assert config(**{name: 128}).num_experts == 128


def test_number_of_experts_stated_twice():
    assert config(num_experts=8, num_local_experts=8).num_experts == 8
    assert config(num_experts=None, num_local_experts=8).num_experts == 8
    assert config().num_experts is None
    with pytest.raises(ConfigError) as caught:
        _ = config(num_experts=8, num_local_experts=16).num_experts
    assert "config.json: found num_experts = 8, num_local_experts = 16; expected one number of experts" in parts(
        caught.value
    )


@pytest.mark.parametrize("name", ["num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"])
def test_experts_of_a_token_under_every_name(name: str):
    assert config(**{name: 6}).top_k == 6
    assert config(text_config={name: 4}).top_k == 4
    assert config().top_k is None


@pytest.mark.parametrize("value", [0, -1, True, 8.0, "8", [8], {}])
@pytest.mark.parametrize("name", ["num_experts", "hidden_size"])
def test_sizes_that_are_none(name: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        getattr(config(**{name: value}), name)
    assert f"config.json: {name}: found {value!r}; expected a positive whole number" in parts(caught.value)


def test_text_config():
    nested = config(
        model_type="qwen3_vl_moe",
        hidden_size=9,
        text_config={"model_type": "qwen3_vl_moe_text", "hidden_size": 64, "num_experts": 4},
    )
    assert (nested.hidden_size, nested.num_experts, nested.model_type) == (64, 4, "qwen3_vl_moe_text")
    assert nested.transposed


def test_the_type_of_the_whole_where_the_text_has_none():
    nested = config(model_type="llama4", text_config={"hidden_size": 64})
    assert nested.model_type == "llama4"
    assert nested.transposed
    assert config(model_type=["x"]).model_type == ""


def test_quantization_config_at_either_place():
    quantization = {"quant_method": "gptq"}
    assert config(quantization_config=quantization).quantization == quantization
    assert config(text_config={"quantization_config": quantization}).quantization == quantization
    assert config(quantization_config=None).quantization is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float16", "text_config": {"hidden_size": 64}}, "float16"),
        ({"dtype": "float16", "text_config": {"dtype": "float32"}}, "float32"),
    ],
)
def test_dtype_of_the_language_model_or_else_of_the_whole(fields: dict[str, object], expected: str | None):
    assert config(**fields).dtype == expected


@pytest.mark.parametrize("name", ["text_config", "quantization_config"])
@pytest.mark.parametrize("value", [[], "x", 3, True])
def test_objects_that_are_none(name: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert f"config.json: {name}: found {value!r}; expected an object" in parts(caught.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_act": "silu"}, Activation("silu")),
        ({"hidden_act": "swish"}, Activation("silu")),
        ({"hidden_act": "gelu_pytorch_tanh"}, Activation("gelu_tanh")),
        ({"hidden_activation": "gelu_pytorch_tanh"}, Activation("gelu_tanh")),
        ({"hidden_act": "gelu_new"}, Activation("gelu_tanh")),
        ({"model_type": "gpt_oss", "hidden_act": "silu"}, Activation("clamped_swiglu", limit=7.0)),
        ({"model_type": "gpt_oss", "swiglu_limit": 5}, Activation("clamped_swiglu", limit=5.0)),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "hidden_act": "silu"}, Activation("relu2")),
    ],
)
def test_activations(fields: dict[str, Any], expected: Activation):
    assert config(**fields).activation == expected
    assert config(**fields).gated == expected.gated


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, "None"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_act": "relu2"}, "'relu2'"),
        ({"hidden_act": ["silu"]}, "['silu']"),
        ({"hidden_act": 3}, "3"),
        ({"model_type": "nemotron_h", "mlp_hidden_act": "silu"}, "'silu'"),
        ({"model_type": "deepseek_v4", "hidden_act": "silu"}, "'silu'"),
        ({"model_type": "muse_spark", "hidden_act": "silu"}, "'silu'"),
        ({"model_type": "openai_privacy_filter", "hidden_act": "silu"}, "'silu'"),
    ],
)
def test_activations_that_are_not_run(fields: dict[str, Any], found: str):
    with pytest.raises(UnsupportedError) as caught:
        _ = config(**fields).activation
    text = parts(caught.value)
    assert f"found {found}; expected silu, swish" in text
    assert text.startswith("config.json: activation of ")
    assert fields.get("model_type", "this model") in text


@pytest.mark.parametrize("limit", [0, -7.0, float("nan"), float("inf"), 10**400, True, "7", [7.0]])
def test_limits_that_clamp_nothing(limit: Any):
    with pytest.raises(ConfigError) as caught:
        _ = config(model_type="gpt_oss", swiglu_limit=limit).activation
    assert "config.json: swiglu_limit" in parts(caught.value)


@pytest.mark.parametrize(
    ("model_type", "transposed", "interleaved", "gated"),
    [
        ("gpt_oss", True, True, True),
        ("llama4_text", True, False, True),
        ("qwen3_vl_moe_text", True, False, True),
        ("aria_text", True, False, True),
        ("qwen3_moe", False, False, True),
        ("granitemoe", False, False, True),
        ("nemotron_h", False, False, False),
        ("", False, False, True),
    ],
)
def test_families(model_type: str, transposed: bool, interleaved: bool, gated: bool):
    found = config(model_type=model_type)
    assert (found.transposed, found.interleaved, found.gated) == (transposed, interleaved, gated)
    assert found.either_order == (model_type == "qwen3_vl_moe_text")
