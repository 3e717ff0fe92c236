from __future__ import annotations

from typing import Any

import pytest
from small_checkpoints import parts

from fanfold.errors import ConfigError, FanfoldError, UnsupportedError
from fanfold.formats.config_fields import Fields
from fanfold.formats.modelopt_scheme import modelopt
from fanfold.spec import WeightFormat

EXPERT = "model.layers.0.mlp.experts.3.up_proj"


def found(module: str = EXPERT, **fields: Any) -> WeightFormat | None:
    return modelopt(Fields("config.json: quantization_config", fields))(module)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("NVFP4", "nvfp4"),
        ("W4A16_NVFP4", "nvfp4"),
        ("MXFP4", "mxfp4"),
        ("W4A8_MXFP4_FP8", "mxfp4"),
        ("FP8", "fp8-tensor"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8-channel"),
    ],
)
@pytest.mark.parametrize("case", [str.upper, str.lower, str.title])
def test_algorithms_in_any_letter_case(algorithm: str, expected: str, case: Any):
    fmt = found(quant_algo=case(algorithm))
    assert fmt is not None
    assert fmt.name == expected


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
def test_fp8_blocks(algorithm: str):
    open_block = found(quant_algo=algorithm)
    assert open_block is not None
    assert (open_block.kind, open_block.block) == ("fp8", None)  # the scales tell
    stated = found(quant_algo=algorithm, weight_block_size=[64, 32])
    assert stated is not None
    assert stated.block == (64, 32)


def test_group_sizes():
    assert found(quant_algo="NVFP4", group_size=16) == WeightFormat("nvfp4", 4, group_size=16)
    assert found(quant_algo="NVFP4", group_size=None) == WeightFormat("nvfp4", 4, group_size=16)
    assert found(quant_algo="FP8", group_size=16) == WeightFormat("fp8", 8, block=(-1, -1))


@pytest.mark.parametrize("field", ["exclude_modules", "ignore"])
@pytest.mark.parametrize(
    ("pattern", "module", "excluded"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("*self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mtp*", EXPERT, False),
    ],
)
def test_excluded_modules(field: str, pattern: str, module: str, excluded: bool):
    assert (found(module, quant_algo="NVFP4", **{field: [pattern]}) is None) is excluded


def test_nvfp4_of_the_mlps_alone():
    excluded = ["lm_head", "model.layers.0.self_attn*"]
    assert found("model.layers.0.self_attn.o_proj", quant_algo="NVFP4", exclude_modules=excluded) is None
    assert found(quant_algo="NVFP4", exclude_modules=excluded) == WeightFormat("nvfp4", 4, group_size=16)


def test_mixed_precision():
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        EXPERT: {"quant_algo": "nvfp4", "group_size": 16},
        "model.layers.1.mlp.experts.3.up_proj": {"quant_algo": "FP8_PB_WO", "weight_block_size": [32, 32]},
    }
    mixed = {"quant_algo": "mixed_precision", "quantized_layers": layers}
    formats = {name: found(name, **mixed) for name in (*layers, "model.layers.0.mlp.gate")}
    assert [None if fmt is None else fmt.name for fmt in formats.values()] == [
        "fp8-tensor",
        "nvfp4",
        "fp8-block32x32",
        None,
    ]


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({}, ConfigError, "quant_algo: found None; expected a string"),
        ({"quant_algo": 4}, ConfigError, "quant_algo: found 4"),
        ({"quant_algo": "W4A16_AWQ"}, UnsupportedError, "quant_algo: found 'W4A16_AWQ'; expected NVFP4, W4A16_NVFP4"),
        ({"quant_algo": "NVFP4_AWQ"}, UnsupportedError, "quant_algo: found 'NVFP4_AWQ'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, UnsupportedError, "group_size: found 32; expected 16"),
        ({"quant_algo": "NVFP4", "group_size": "16"}, ConfigError, "group_size: found '16'"),
        ({"quant_algo": "MXFP4", "group_size": 16}, UnsupportedError, "group_size: found 16; expected 32"),
        ({"quant_algo": "FP8_PB_WO", "weight_block_size": 128}, ConfigError, "weight_block_size: found 128"),
        ({"quant_algo": "NVFP4", "ignore": "lm_head"}, ConfigError, "ignore: found 'lm_head'"),
        ({"quant_algo": "MIXED_PRECISION"}, ConfigError, "quantized_layers: found None; expected an object"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT8_SQ"}}},
            UnsupportedError,
            "quantized_layers.a.quant_algo: found 'INT8_SQ'",
        ),
    ],
)
def test_refused(fields: dict[str, Any], kind: type[FanfoldError], text: str):
    with pytest.raises(kind) as caught:
        found(**fields)
    message = parts(caught.value)
    assert message.startswith("config.json: quantization_config.")
    assert text in message
