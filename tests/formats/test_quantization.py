"""The quantiser's config, from config.json and the side files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_checkpoints import parts

from fanfold.errors import ConfigError, CorruptFileError, FanfoldError, UnsupportedError
from fanfold.formats.config import ModelConfig
from fanfold.formats.quantization import GPTQ_SIDE, METHODS, MODELOPT_SIDE, Quantization, read_quantization

GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def found(folder: Path, quantization: Any, **sides: Any) -> Quantization:
    for name, content in sides.items():
        (folder / {"gptq": GPTQ_SIDE, "modelopt": MODELOPT_SIDE}[name]).write_text(json.dumps(content))
    config = {} if quantization is None else {"quantization_config": quantization}
    return read_quantization(folder, ModelConfig.of(str(folder / "config.json"), config))


def refusal(folder: Path, kind: type[FanfoldError], quantization: Any, **sides: Any) -> str:
    with pytest.raises(kind) as caught:
        found(folder, quantization, **sides)
    return parts(caught.value)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_no_quantization(tmp_path: Path):
    plain = found(tmp_path, None)
    assert plain.method is None
    assert plain.scheme("model.layers.0.mlp.experts.0.up_proj") is None


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("gptq", {"bits": 4, "group_size": 128}),
        ("awq", {"bits": 4, "group_size": 128}),
        ("compressed-tensors", {"config_groups": {}}),
        ("modelopt", {"quant_algo": "FP8"}),
        ("fp8", {}),
        ("mxfp4", {}),
    ],
)
def test_methods(tmp_path: Path, method: str, fields: dict[str, Any]):
    assert method in METHODS
    assert found(tmp_path, {"quant_method": method, **fields}).method == method


@pytest.mark.parametrize("method", ["bitsandbytes", "auto-round", "nvfp4", "GPTQ", "torchao", ""])
def test_unknown_methods(tmp_path: Path, method: str):
    kind = ConfigError if method == "" else UnsupportedError
    text = refusal(tmp_path, kind, {**GPTQ, "quant_method": method} if method else {**GPTQ, "quant_method": None})
    assert f"{tmp_path / 'config.json'}: quantization_config.quant_method: found {method or None!r}" in text
    assert "expected one of gptq, awq, compressed-tensors, modelopt, fp8, mxfp4" in text


@pytest.mark.parametrize("method", [4, True, ["gptq"], {}])
def test_methods_that_are_no_names(tmp_path: Path, method: Any):
    text = refusal(tmp_path, ConfigError, {**GPTQ, "quant_method": method})
    assert f"quant_method: found {method!r}" in text


def test_a_missing_method(tmp_path: Path):
    text = refusal(tmp_path, ConfigError, without(GPTQ, "quant_method"))
    assert "quantization_config.quant_method: found None" in text
    assert "Add the quant_method of the tool that wrote the weights." in text


def test_the_other_name_of_the_method(tmp_path: Path):
    assert found(tmp_path, {**without(GPTQ, "quant_method"), "method": "gptq"}).method == "gptq"


def test_missing_checkpoint_format_is_v1(tmp_path: Path):
    fmt = found(tmp_path, without(GPTQ, "checkpoint_format")).scheme("x")
    assert fmt is not None
    assert fmt.zero_point == "v1"


def test_the_side_file_alone(tmp_path: Path):
    alone = found(tmp_path, None, gptq=without(GPTQ, "quant_method"))
    assert alone.method == "gptq"
    assert str(alone.scheme("x")) == "gptq4-g128-v1"
    text = refusal(tmp_path, UnsupportedError, None, gptq={**GPTQ, "bits": 5})
    assert f"{tmp_path / GPTQ_SIDE}.bits: found 5" in text


def test_modelopts_side_file_alone(tmp_path: Path):
    alone = found(tmp_path, None, modelopt={"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}})
    assert alone.method == "modelopt"
    assert (str(alone.scheme("x")), alone.scheme("lm_head")) == ("nvfp4", None)


def test_what_one_file_leaves_out_comes_from_the_other(tmp_path: Path):
    both = found(tmp_path, {"quant_method": "gptq", "bits": 4, "group_size": None}, gptq={"bits": 4, "group_size": 64})
    assert str(both.scheme("x")) == "gptq4-g64-v1"


def test_files_that_agree(tmp_path: Path):
    assert str(found(tmp_path, GPTQ, gptq={**GPTQ, "format": "gptq", "meta": {"x": 1}}).scheme("x")) == "gptq4-g128-v1"
    upper = {"producer": {}, "quantization": {"quant_algo": "nvfp4", "kv_cache_quant_algo": None, "group_size": 16}}
    (tmp_path / GPTQ_SIDE).unlink()
    assert str(found(tmp_path, MODELOPT, modelopt=upper).scheme("x")) == "nvfp4"


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("bits", 4, 8),
        ("bits", 4, "4"),
        ("group_size", 128, 32),
        ("group_size", 128, -1),
        ("sym", True, False),
        ("desc_act", False, True),
        ("checkpoint_format", "gptq", "gptq_v2"),
        ("quant_method", "gptq", "awq"),
        ("pack_dtype", "int32", "int64"),
        ("dynamic", {"-:a": {}}, {"-:b": {}}),
    ],
)
def test_files_that_disagree(tmp_path: Path, field: str, ours: Any, theirs: Any):
    text = refusal(tmp_path, ConfigError, {**GPTQ, field: ours}, gptq={**GPTQ, field: theirs})
    assert f"{tmp_path / 'config.json'}: quantization_config.{field}: found {ours!r}" in text
    assert f"but {tmp_path / GPTQ_SIDE} says {theirs!r}; expected one value in both files" in text


def test_files_that_disagree_under_unlike_names(tmp_path: Path):
    text = refusal(tmp_path, ConfigError, GPTQ, gptq={**without(GPTQ, "checkpoint_format"), "format": "gptq_v2"})
    assert "checkpoint_format: found 'gptq', but" in text
    assert "says 'gptq_v2'" in text
    text = refusal(tmp_path, ConfigError, GPTQ, gptq={"method": "awq"})
    assert "quant_method: found 'gptq', but" in text


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [("quant_algo", "NVFP4", "FP8"), ("group_size", 16, 32), ("weight_block_size", [128, 128], [64, 64])],
)
def test_modelopts_files_that_disagree(tmp_path: Path, field: str, ours: Any, theirs: Any):
    side = {"quantization": {**without(MODELOPT, "quant_method"), field: theirs}}
    text = refusal(tmp_path, ConfigError, {**MODELOPT, field: ours}, modelopt=side)
    assert f"{tmp_path / 'config.json'}: quantization_config.{field}: found {ours!r}" in text
    assert f"but {tmp_path / MODELOPT_SIDE}: quantization says {theirs!r}" in text


def test_both_side_files_are_compared(tmp_path: Path):
    side = {"quantization": {"quant_algo": "FP8"}}
    text = refusal(tmp_path, ConfigError, MODELOPT, gptq={}, modelopt=side)
    assert "quant_algo: found 'NVFP4'" in text
    text = refusal(tmp_path, ConfigError, None, gptq={**GPTQ, "quant_algo": "NVFP4"}, modelopt=side)
    assert "quant_algo: found 'NVFP4'" in text


@pytest.mark.parametrize("inner", [None, [], "x", 3])
def test_modelopts_side_file_without_its_object(tmp_path: Path, inner: Any):
    text = refusal(tmp_path, ConfigError, MODELOPT, modelopt={"quantization": inner})
    assert f"{tmp_path / MODELOPT_SIDE}: quantization: found {inner!r}; expected an object" in text


@pytest.mark.parametrize("name", [GPTQ_SIDE, MODELOPT_SIDE])
def test_side_files_that_are_no_json(tmp_path: Path, name: str):
    (tmp_path / name).write_text("{")
    assert f"{tmp_path / name}: found no JSON" in refusal(tmp_path, CorruptFileError, GPTQ)
