"""compressed-tensors' config; which group a module belongs to is compared with that library's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle import apply_quantization_config
from small_checkpoints import compressed, parts

from fanfold.errors import ConfigError, FanfoldError, UnsupportedError
from fanfold.formats.compressed_tensors_scheme import compressed_tensors
from fanfold.formats.config_fields import Fields
from fanfold.formats.schemes import Scheme

EXPERT = "model.layers.0.mlp.experts.3.up_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def scheme_of(config: dict[str, Any]) -> Scheme:
    return compressed_tensors(Fields("config.json: quantization_config", config))


def name_of(scheme: Scheme, module: str = EXPERT) -> str | None:
    fmt = scheme(module)
    return None if fmt is None else fmt.name


@pytest.mark.parametrize(
    ("layout", "weights", "expected"),
    [
        ("pack-quantized", INT4, "packed4-g32"),
        ("pack-quantized", {**INT4, "num_bits": 3, "group_size": 128}, "packed3-g128"),
        ("pack-quantized", {**INT4, "symmetric": False}, "packed4-g32-asym"),
        ("pack-quantized", {**INT4, "symmetric": None}, "packed4-g32"),
        ("pack-quantized", {**INT4, "num_bits": 8, "strategy": "channel", "group_size": None}, "packed8-channel"),
        ("pack-quantized", {**INT4, "strategy": "CHANNEL", "group_size": -1}, "packed4-channel"),
        ("pack-quantized", {**INT4, "actorder": "weight"}, "packed4-g32"),
        ("pack-quantized", {**INT4, "actorder": "static"}, "packed4-g32"),
        ("pack-quantized", {**INT4, "actorder": False}, "packed4-g32"),
        ("pack-quantized", {**INT4, "actorder": "group"}, "packed4-g32-actorder"),
        ("pack-quantized", {**INT4, "actorder": True}, "packed4-g32-actorder"),
        ("nvfp4-pack-quantized", FP4, "nvfp4-divisor"),
        ("mxfp4-pack-quantized", {**FP4, "strategy": "group", "group_size": 32}, "mxfp4"),
        ("float-quantized", FP8, "fp8-channel"),
        ("naive-quantized", FP8, "fp8-channel"),
        ("float-quantized", {**FP8, "strategy": "tensor"}, "fp8-tensor"),
        ("float-quantized", {**FP8, "strategy": "block", "block_structure": [128, 64]}, "fp8-block128x64"),
        ("float-quantized", {**FP8, "strategy": "block", "block_structure": "128x64"}, "fp8-block128x64"),
        ("dense", INT4, None),
    ],
)
def test_formats(layout: str, weights: dict[str, Any], expected: str | None):
    assert name_of(scheme_of(compressed(layout, weights))) == expected


def test_b12_actorder_null_needs_no_g_idx():
    assert name_of(scheme_of(compressed("pack-quantized", {**INT4, "actorder": None}))) == "packed4-g32"


@pytest.mark.parametrize(
    ("layout", "weights", "kind", "text"),
    [
        ("pack-quantized", {**INT4, "num_bits": 5}, UnsupportedError, "weights.num_bits: found 5; expected 2 or 3"),
        ("pack-quantized", {**INT4, "num_bits": "4"}, ConfigError, "weights.num_bits: found '4'"),
        ("pack-quantized", {**INT4, "num_bits": None}, ConfigError, "weights.num_bits: found None"),
        ("pack-quantized", {**INT4, "group_size": 0}, ConfigError, "weights.group_size: found 0"),
        ("pack-quantized", {**INT4, "group_size": None}, ConfigError, "weights.group_size: found None"),
        ("pack-quantized", {**INT4, "strategy": "tensor"}, UnsupportedError, "weights.strategy: found 'tensor'"),
        ("pack-quantized", {**INT4, "strategy": None}, ConfigError, "weights.strategy: found None"),
        (
            "pack-quantized",
            {**INT4, "type": "float"},
            UnsupportedError,
            "'pack-quantized' with weights of type 'float'",
        ),
        (
            "int-quantized",
            {**INT4, "num_bits": 8},
            UnsupportedError,
            "found 'int-quantized' with weights of type 'int', 8",
        ),
        (
            "float-quantized",
            {**FP8, "num_bits": 6},
            UnsupportedError,
            "'float-quantized' with weights of type 'float', 6",
        ),
        ("float-quantized", {**FP8, "strategy": "group"}, UnsupportedError, "weights.strategy: found 'group'"),
        ("float-quantized", {**FP8, "strategy": "block"}, ConfigError, "weights.block_structure: found None"),
        (
            "nvfp4-pack-quantized",
            {**FP4, "group_size": 32},
            UnsupportedError,
            "weights.group_size: found 32; expected 16",
        ),
        ("mxfp4-pack-quantized", FP4, UnsupportedError, "weights.group_size: found 16; expected 32"),
        ("nvfp4-pack-quantized", INT4, UnsupportedError, "found 'nvfp4-pack-quantized' with weights of type 'int'"),
        ("marlin-24", INT4, UnsupportedError, "found 'marlin-24' with weights of type 'int', 4 bits"),
    ],
)
def test_formats_refused(layout: str, weights: dict[str, Any], kind: type[FanfoldError], text: str):
    with pytest.raises(kind) as caught:
        scheme_of(compressed(layout, weights))
    found = parts(caught.value)
    assert found.startswith("config.json: quantization_config.config_groups.group_0.")
    assert text in found


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"config_groups": None}, ConfigError, "config_groups: found None; expected an object"),
        ({"config_groups": []}, ConfigError, "config_groups: found []; expected an object"),
        ({"config_groups": {"group_0": 3}}, ConfigError, "config_groups.group_0: found 3; expected an object"),
        ({"config_groups": {"g": {"targets": "Linear"}}}, ConfigError, "targets: found 'Linear'; expected a list"),
        ({"ignore": "lm_head"}, ConfigError, "ignore: found 'lm_head'; expected a list of module names"),
        ({"ignore": ["re:("]}, ConfigError, "ignore: found '('"),
        (
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            UnsupportedError,
            "sparsity_config.format: found 'sparse-",
        ),
        ({"transform_config": {"config_groups": {"R1": {}}}}, UnsupportedError, "transform_config: found {'config"),
    ],
)
def test_configs_refused(fields: dict[str, Any], kind: type[FanfoldError], text: str):
    with pytest.raises(kind) as caught:
        scheme_of({**compressed("pack-quantized", INT4), **fields})
    assert text in parts(caught.value)


def test_storage_that_is_not_sparse():
    scheme = scheme_of(compressed("pack-quantized", INT4, sparsity_config={"format": "dense"}, transform_config={}))
    assert name_of(scheme) == "packed4-g32"


def test_a_group_without_weights_and_a_format_of_the_whole():
    config = compressed("pack-quantized", INT4)
    del config["config_groups"]["group_0"]["format"]
    assert name_of(scheme_of(config)) == "packed4-g32"
    config["config_groups"]["group_0"]["weights"] = None
    assert name_of(scheme_of(config)) is None


MODULES = [
    f"model.layers.{layer}.{rest}"
    for layer in (0, 1)
    for rest in ("self_attn.q_proj", "mlp.gate", "mlp.experts.0.gate_proj", "mlp.experts.0.down_proj", "mlp.gate_proj")
] + ["lm_head"]
W8 = {**INT4, "num_bits": 8}
W3 = {**INT4, "num_bits": 3}


def group(weights: dict[str, Any], *targets: str) -> dict[str, Any]:
    return {"targets": list(targets), "weights": weights, "format": "pack-quantized"}


@pytest.mark.parametrize(
    ("groups", "ignore"),
    [
        ([group(INT4, "Linear")], ["lm_head", "re:.*mlp.gate$"]),
        ([group(INT4, "Linear")], ["mlp.gate", "gate", "model.layers.0"]),  # no ends, no parts of names
        ([group(INT4, "Linear"), group(W8, "re:.*down_proj")], []),
        ([group(W8, "re:.*down_proj"), group(INT4, "Linear")], []),
        ([group(W8, "re:.*proj"), group(INT4, "re:.*down_proj")], []),  # patterns in the order of the alphabet
        ([group(INT4, "re:.*down_proj"), group(W8, "re:.*proj")], []),
        ([group(W3, "model.layers.1.mlp.experts.0.down_proj"), group(W8, "re:.*down_proj"), group(INT4, "Linear")], []),
        ([group(W8, "re:.*experts.*"), group(W3, "down_proj")], ["re:model.layers.1"]),
        ([group(INT4, "Linear")], ["Linear"]),
        ([group(INT4, "re:layers")], []),
    ],
)
def test_groups_and_ignored_modules_as_the_library_has_them(groups: list[dict[str, Any]], ignore: list[str]):
    model = torch.nn.Module()
    for name in MODULES:
        place = model
        for part in name.split(".")[:-1]:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.add_module(name.rpartition(".")[2], torch.nn.Linear(32, 32, bias=False))
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{at}": entry for at, entry in enumerate(groups)},
        "ignore": ignore,
    }
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    scheme = scheme_of(config)
    for name in MODULES:
        theirs = getattr(model.get_submodule(name), "quantization_scheme", None)
        ours = scheme(name)
        assert (None if ours is None else ours.bits) == (None if theirs is None else theirs.weights.num_bits), name
