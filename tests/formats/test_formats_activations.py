"""What configs say of activations."""

from __future__ import annotations

from typing import Any

import pytest

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.formats import activations
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.config_fields import Fields
from samples import sample

EXPERT = "model.layers.0.mlp.experts.3.up_proj"
DOWN = "model.layers.0.mlp.experts.3.down_proj"
# By each tool's own golden files.
STATED = {
    "ct_qwen3moe_nvfp4": "nvfp4",
    "nvfp4": "nvfp4",
    "ct_qwen3moe_nvfp4a16": "plain",
    "ct_qwen3moe_fp8_dynamic": "fp8",
    "ct_qwen3moe_fp8_block": "fp8",
    "ct_qwen3moe_w4a16_asym": "plain",
    "modelopt_qwen3moe_nvfp4": "nvfp4",
    "modelopt_qwen3moe_w4a16_nvfp4": "plain",
    "modelopt_qwen3moe_fp8": "fp8-static",
    "modelopt_qwen3moe_fp8_pb": "plain",
    "modelopt_qwen3moe_mxfp4": "mxfp4",
    "gptqmodel_qwen3moe_w4_g32": "plain",
    "native_gptoss_mxfp4": "plain",
    "base_mixtral_tiny_bf16": "plain",
}


@pytest.mark.parametrize("name", STATED)
def test_checkpoints_of_the_tools(name: str) -> None:
    checkpoint = Checkpoint(sample(name))
    for layer in checkpoint.layers:
        assert {info.activations for info in checkpoint.describe(layer).values()} == {STATED[name]}
    weights = checkpoint.read_experts(0)
    assert (weights.gate_up.activations, weights.down.activations) == (STATED[name], STATED[name])


def fields(config: dict[str, Any]) -> Fields:
    return Fields("config.json: quantization_config", config)


def group(inputs: dict[str, Any] | None, *targets: str) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return {"targets": list(targets), "weights": weights, "input_activations": inputs}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (None, "plain"),
        ({"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"}, "nvfp4"),
        ({"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}, "nvfp4"),
        ({"num_bits": 4, "type": "float", "group_size": 32, "dynamic": True}, "mxfp4"),
        ({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}, "fp8"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, "fp8-static"),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, "int8"),
        ({"num_bits": 8, "type": "int", "strategy": "tensor"}, "int8-static"),
    ],
)
def test_input_activations(inputs: dict[str, Any] | None, expected: str) -> None:
    config = {"config_groups": {"group_0": group(inputs, "Linear")}, "ignore": ["lm_head"]}
    scheme = activations.compressed_tensors(fields(config))
    assert scheme(EXPERT) == expected
    assert scheme("lm_head") == "plain"


def test_groups_of_their_own() -> None:
    nvfp4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"}
    groups = {"a": group(nvfp4, "re:.*up_proj"), "b": group(None, "Linear")}
    scheme = activations.compressed_tensors(fields({"config_groups": groups}))
    assert (scheme(EXPERT), scheme(DOWN)) == ("nvfp4", "plain")


@pytest.mark.parametrize(
    ("inputs", "field"),
    [([4], "input_activations"), ({"type": "float"}, "num_bits"), ({"num_bits": 4, "type": 4}, "type")],
)
def test_malformed_fields_are_named(inputs: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        activations.compressed_tensors(fields({"config_groups": {"group_0": group(inputs, "Linear")}}))


def test_algorithms_of_modelopt() -> None:
    found = activations.modelopt(fields({"quant_algo": "nvfp4", "exclude_modules": ["*down_proj"]}))
    assert (found(EXPERT), found(DOWN)) == ("nvfp4", "plain")
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {EXPERT: {"quant_algo": "FP8"}}}
    found = activations.modelopt(fields(mixed))
    assert (found(EXPERT), found(DOWN)) == ("fp8-static", "plain")
    assert activations.modelopt(fields({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}))(EXPERT) == "fp8"


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, "fp8"), ({"activation_scheme": "dynamic"}, "fp8"), ({"activation_scheme": "static"}, "fp8-static")],
)
def test_fine_grained_fp8(config: dict[str, Any], expected: str) -> None:
    assert activations.fp8(fields(config))(EXPERT) == expected


def test_experts_of_one_projection_have_one_scheme() -> None:
    checkpoint = Checkpoint(sample("ct_qwen3moe_nvfp4"))
    other = "model.layers.0.mlp.experts.5.up_proj"
    stated = checkpoint.quantization.activations
    object.__setattr__(checkpoint.quantization, "activations", lambda m: "plain" if m == other else stated(m))
    with pytest.raises(UnsupportedError, match=f"plain for {other}; expected the same for all experts") as caught:
        checkpoint.read_experts(0)
    assert caught.value.what.endswith("activations of model.layers.0.mlp.experts")
    assert checkpoint.read_experts(1).gate_up.activations == "nvfp4"


def test_nothing_is_said_of_weights_that_are_not_quantised() -> None:
    checkpoint = Checkpoint(sample("base_qwen3moe_tiny_bf16"))
    object.__setattr__(checkpoint.quantization, "activations", lambda module: "fp8")
    assert {info.activations for info in checkpoint.describe(0).values()} == {"plain"}
    assert checkpoint.read_experts(0).down.activations == "plain"
