"""GPTQ, AWQ, fine-grained FP8 and gpt-oss's MXFP4: what their configs say of each module."""

from __future__ import annotations

from typing import Any

import pytest
from small_checkpoints import parts

from fanfold.errors import ConfigError, FanfoldError, UnsupportedError
from fanfold.formats.config_fields import Fields
from fanfold.formats.schemes import Scheme, awq, fp8, gptq, mxfp4
from fanfold.spec import WeightFormat

EXPERT = "model.layers.0.mlp.experts.3.up_proj"
GPTQ = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


def scheme_of(make: Any, base: dict[str, Any] | None = None, **fields: Any) -> Scheme:
    return make(Fields("config.json: quantization_config", {**(base or {}), **fields}))


def name_of(scheme: Scheme, module: str = EXPERT) -> str | None:
    fmt = scheme(module)
    return None if fmt is None else fmt.name


def refusal(make: Any, kind: type[FanfoldError], base: dict[str, Any] | None = None, **fields: Any) -> str:
    with pytest.raises(kind) as caught:
        scheme_of(make, base, **fields)
    return parts(caught.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "gptq4-g128-v1"),
        ({"checkpoint_format": "gptq"}, "gptq4-g128-v1"),
        ({"checkpoint_format": "gptq_v2"}, "gptq4-g128-v2"),
        ({"checkpoint_format": None, "format": "gptq_v2"}, "gptq4-g128-v2"),
        ({"checkpoint_format": "GPTQ_V2"}, "gptq4-g128-v2"),
        ({"sym": False}, "gptq4-g128-asym-v1"),
        ({"sym": None}, "gptq4-g128-v1"),
        ({"group_size": -1, "bits": 8}, "gptq8-channel-v1"),
        ({"bits": 3, "group_size": 64}, "gptq3-g64-v1"),
        ({"bits": 2, "group_size": 32}, "gptq2-g32-v1"),
        ({"desc_act": True}, "gptq4-g128-v1-actorder"),
        ({"desc_act": True, "group_size": -1}, "gptq4-channel-v1"),
    ],
)
def test_gptq(fields: dict[str, Any], expected: str):
    assert name_of(scheme_of(gptq, GPTQ, **fields)) == expected


def test_b18_gptq_without_desc_act():
    fields = {name: value for name, value in GPTQ.items() if name != "desc_act"}
    assert name_of(scheme_of(gptq, fields)) == "gptq4-g128-v1"
    assert name_of(scheme_of(gptq, fields, desc_act=None)) == "gptq4-g128-v1"


def test_b4_group_size_minus_1():
    for bits in (4, 8):
        assert name_of(scheme_of(gptq, GPTQ, bits=bits, group_size=-1)) == f"gptq{bits}-channel-v1"


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"bits": 5}, UnsupportedError, "bits: found 5; expected 2 or 3 or 4 or 8"),
        ({"bits": "4"}, ConfigError, "bits: found '4'; expected a whole number"),
        ({"bits": 4.0}, ConfigError, "bits: found 4.0"),
        ({"bits": True}, ConfigError, "bits: found True"),
        ({"bits": None}, ConfigError, "bits: found None"),
        ({"group_size": 0}, ConfigError, "group_size: found 0; expected a positive number, or -1"),
        ({"group_size": -2}, ConfigError, "group_size: found -2"),
        ({"sym": "yes"}, ConfigError, "sym: found 'yes'"),
        ({"desc_act": 1}, ConfigError, "desc_act: found 1"),
        (
            {"checkpoint_format": "gptq_p"},
            UnsupportedError,
            "checkpoint_format: found 'gptq_p'; expected gptq or gptq_v2",
        ),
        ({"checkpoint_format": "marlin"}, UnsupportedError, "checkpoint_format: found 'marlin'"),
        ({"format": 2}, ConfigError, "format: found 2; expected a string"),
        ({"pack_dtype": "int64"}, UnsupportedError, "pack_dtype: found 'int64'; expected int32"),
        (
            {"checkpoint_format": "gptq_v2", "format": "gptq"},
            ConfigError,
            "found checkpoint_format = gptq_v2, format = gptq; expected one of the two in both",
        ),
        ({"dynamic": ["x"]}, ConfigError, "dynamic: found ['x']; expected an object"),
        ({"dynamic": {"+:(": {}}}, ConfigError, "dynamic.+:(: found '('"),
        ({"dynamic": {"+:a": 3}}, ConfigError, "dynamic.+:a: found 3; expected an object"),
        ({"dynamic": {"+:a": {"bits": 5}}}, UnsupportedError, "dynamic.+:a.bits: found 5"),
        ({"modules_in_block_to_quantize": "q"}, ConfigError, "modules_in_block_to_quantize: found 'q'"),
        ({"modules_in_block_to_quantize": [[1]]}, ConfigError, "modules_in_block_to_quantize: found [[1]]"),
    ],
)
def test_gptq_refused(fields: dict[str, Any], kind: type[FanfoldError], text: str):
    found = refusal(gptq, kind, GPTQ, **fields)
    assert found.startswith("config.json: quantization_config")
    assert text in found


def test_gptq_dynamic():
    dynamic = {
        r"-:.*\.shared_expert\.": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 32},
        r".*\.layers\.1\..*up_proj": {"sym": False},
        r"+:.*\.layers\.1\..*": {"bits": 2},
        r"+:.*gate_proj": {"desc_act": True},
    }
    scheme = scheme_of(gptq, GPTQ, dynamic=dynamic)
    assert name_of(scheme, "model.layers.0.mlp.shared_expert.up_proj") is None
    assert name_of(scheme, "model.layers.0.mlp.experts.0.down_proj") == "gptq8-g32-v1"
    assert name_of(scheme, "model.layers.1.mlp.experts.0.down_proj") == "gptq8-g32-v1"  # the first that matches
    assert name_of(scheme, "model.layers.1.mlp.experts.0.up_proj") == "gptq4-g128-asym-v1"
    assert name_of(scheme, "model.layers.1.mlp.experts.0.gate_proj") == "gptq2-g128-v1"
    assert name_of(scheme, "model.layers.0.mlp.experts.0.gate_proj") == "gptq4-g128-v1-actorder"
    assert name_of(scheme, "model.layers.0.mlp.experts.0.up_proj") == "gptq4-g128-v1"
    assert name_of(scheme_of(gptq, GPTQ, dynamic={})) == "gptq4-g128-v1"
    assert name_of(scheme_of(gptq, GPTQ, dynamic=None)) == "gptq4-g128-v1"


def test_gptq_patterns_match_from_the_start():
    scheme = scheme_of(gptq, GPTQ, dynamic={"-:layers": {}})
    assert name_of(scheme, "layers.0.x") is None
    assert name_of(scheme, "model.layers.0.x") == "gptq4-g128-v1"


def test_gptq_of_some_modules_alone():
    scheme = scheme_of(gptq, GPTQ, modules_in_block_to_quantize=[["self_attn.q_proj", "self_attn.k_proj"], ["o_proj"]])
    assert name_of(scheme) is None
    assert name_of(scheme, "model.layers.0.self_attn.k_proj") == "gptq4-g128-v1"
    assert name_of(scheme, "model.layers.0.self_attn.o_proj") == "gptq4-g128-v1"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "awq4-g128-asym"),
        ({"version": "GEMM", "format": "gemm", "checkpoint_format": "gemm"}, "awq4-g128-asym"),
        ({"version": None}, "awq4-g128-asym"),
        ({"zero_point": False}, "awq4-g128"),
        ({"zero_point": None}, "awq4-g128-asym"),
        ({"group_size": -1}, "awq4-channel-asym"),
        ({"backend": "autoawq"}, "awq4-g128-asym"),
    ],
)
def test_awq(fields: dict[str, Any], expected: str):
    assert name_of(scheme_of(awq, AWQ, **fields)) == expected


def test_awq_skips_modules():
    scheme = scheme_of(awq, AWQ, modules_to_not_convert=["mlp.gate.", "layers.1."])
    assert name_of(scheme, "model.layers.1.mlp.experts.0.up_proj") is None
    assert name_of(scheme, "model.layers.0.mlp.experts.0.gate_proj") == "awq4-g128-asym"


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"version": "gemv"}, UnsupportedError, "version: found 'gemv'; expected gemm"),
        ({"version": "gemv_fast"}, UnsupportedError, "version: found 'gemv_fast'"),
        ({"format": "llm-awq"}, UnsupportedError, "format: found 'llm-awq'"),
        ({"checkpoint_format": "marlin"}, UnsupportedError, "checkpoint_format: found 'marlin'"),
        ({"backend": "llm-awq"}, UnsupportedError, "backend: found 'llm-awq'"),
        ({"bits": 8}, UnsupportedError, "bits: found 8; expected 4"),
        ({"bits": None}, ConfigError, "bits: found None"),
        ({"group_size": 0}, ConfigError, "group_size: found 0"),
        ({"zero_point": 0}, ConfigError, "zero_point: found 0"),
        ({"modules_to_not_convert": "gate"}, ConfigError, "modules_to_not_convert: found 'gate'"),
    ],
)
def test_awq_refused(fields: dict[str, Any], kind: type[FanfoldError], text: str):
    assert text in refusal(awq, kind, AWQ, **fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"weight_block_size": [128, 128]}, "fp8-block128x128"),
        ({"weight_block_size": [32, 64]}, "fp8-block32x64"),
        ({"weight_block_size": None}, "fp8-tensor"),
        ({"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"}, "fp8-tensor"),
    ],
)
def test_fp8(fields: dict[str, Any], expected: str):
    assert name_of(scheme_of(fp8, **fields)) == expected


@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("skipped", "module", "inside"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.0", EXPERT, True),
        ("layers.0", EXPERT, True),
        ("model.layers.*.mlp", EXPERT, True),
        ("mlp.experts", EXPERT, True),
        ("up_proj", EXPERT, True),
        ("model.layers.0", "model.layers.01.mlp", False),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.1", EXPERT, False),
        ("experts.3", "model.layers.0.mlp.experts.33.up_proj", False),
    ],
)
def test_fp8_skips_modules(field: str, skipped: str, module: str, inside: bool):
    scheme = scheme_of(fp8, weight_block_size=[128, 128], **{field: [skipped]})
    assert (scheme(module) is None) is inside


@pytest.mark.parametrize("block", [[128], [0, 128], 128, "no", [128, None]])
def test_fp8_blocks_that_are_none(block: Any):
    text = refusal(fp8, ConfigError, weight_block_size=block)
    assert f"weight_block_size: found {block!r}; expected two positive numbers" in text


def test_mxfp4():
    scheme = scheme_of(
        mxfp4, modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    )
    assert scheme("model.layers.0.mlp.experts") == WeightFormat("mxfp4", 4, group_size=32)
    assert scheme("model.layers.0.self_attn.q_proj") is None
    assert scheme("model.layers.10.mlp.router") is None
