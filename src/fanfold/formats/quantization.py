"""Quantization: the quantiser's config of a checkpoint, from config.json and the side files older tools write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.formats.config import ModelConfig
from fanfold.formats.files import read_json
from fanfold.formats.schemes import Fields, Scheme, awq, compressed_tensors, fp8, gptq, modelopt, mxfp4

METHODS: Mapping[str, Callable[[Fields], Scheme]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "fp8": fp8,
    "mxfp4": mxfp4,
}
# Side files, and the fields that must agree with config.json where both say them.
GPTQ_SIDE = "quantize_config.json"
GPTQ_FIELDS = (
    "bits",
    "group_size",
    "sym",
    "desc_act",
    "checkpoint_format",
    "format",
    "zero_point",
    "version",
    "quant_method",
)
MODELOPT_SIDE = "hf_quant_config.json"
MODELOPT_FIELDS = ("quant_algo", "group_size", "weight_block_size")


@dataclass(frozen=True)
class Quantization:
    """What the config says of the weights of each module.

    Attributes:
        method: `quant_method`, or None for a checkpoint that is not quantised.
        scheme: module name -> WeightFormat, or None where the module is not quantised.
    """

    method: str | None
    scheme: Scheme


def read_quantization(directory: Path, config: ModelConfig) -> Quantization:
    """The quantization of a checkpoint.

    Raises:
        ConfigError: a field is missing or malformed, or config.json and a side file disagree on what matters.
        UnsupportedError: an unknown quant_method, or a variant that fanfold does not run.
    """
    fields = dict(config.quantization or {})
    where = f"{config.path}: quantization_config"
    side = _side_file(directory)
    if side is not None:
        name, stated, checked = side
        _compare(where, fields, f"{directory / name}", stated, checked)
        if not fields:
            where = str(directory / name)
        fields = {**stated, **fields}
    if not fields:
        return Quantization(None, lambda module: None)
    method = fields.get("quant_method") or fields.get("method")
    if method is None and side is not None:
        method = "modelopt" if side[0] == MODELOPT_SIDE else "gptq"
    make = METHODS.get(method) if isinstance(method, str) else None
    if make is None:
        raise UnsupportedError(
            f"{where}.quant_method",
            found=repr(method),
            expected=f"one of {', '.join(METHODS)}",
            next_step="Requantise the model to one of the formats in fanfold's README.",
        )
    return Quantization(cast(str, method), make(Fields(where, fields)))


def _side_file(directory: Path) -> tuple[str, dict[str, Any], tuple[str, ...]] | None:
    """Name, fields and fields to compare of the side file, where there is one."""
    if (directory / GPTQ_SIDE).exists():
        return GPTQ_SIDE, read_json(directory / GPTQ_SIDE), GPTQ_FIELDS
    if (directory / MODELOPT_SIDE).exists():
        whole = read_json(directory / MODELOPT_SIDE)
        inner = whole.get("quantization")
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{directory / MODELOPT_SIDE}: quantization",
                found=repr(inner),
                expected="an object",
                next_step="Fetch the file again.",
            )
        return MODELOPT_SIDE, cast(dict[str, Any], inner), MODELOPT_FIELDS
    return None


def _compare(
    where: str, fields: Mapping[str, Any], side: str, stated: Mapping[str, Any], checked: tuple[str, ...]
) -> None:
    for name in checked:
        ours, theirs = fields.get(name), stated.get(name)
        if ours is None or theirs is None or _plain(ours) == _plain(theirs):
            continue
        raise ConfigError(
            f"{where}.{name}",
            found=f"{ours!r}, but {side} says {theirs!r}",
            expected="one value in both files",
            next_step="Find out which file belongs to these weights and correct the other.",
        )


def _plain(value: object) -> object:
    """Case does not matter in names."""
    return value.lower() if isinstance(value, str) else value
