"""Quantization: the quantiser's config of a checkpoint, from config.json and the side files older tools write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.formats.activations import SCHEMES, ActivationScheme, weight_only
from fanfold.formats.compressed_tensors_scheme import compressed_tensors
from fanfold.formats.config import ModelConfig
from fanfold.formats.config_fields import Fields
from fanfold.formats.files import read_json_if_there
from fanfold.formats.modelopt_scheme import modelopt
from fanfold.formats.schemes import Scheme, awq, fp8, gptq, mxfp4
from fanfold.formats.values import shown

METHODS: Mapping[str, Callable[[Fields], Scheme]] = {
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "fp8": fp8,
    "mxfp4": mxfp4,
}
GPTQ_SIDE = "quantize_config.json"
MODELOPT_SIDE = "hf_quant_config.json"
# What must agree where two files state it, each with the names it goes by.
METHOD = ("quant_method", "method")
CHECKED: tuple[tuple[str, ...], ...] = (
    METHOD,
    ("bits",),
    ("group_size",),
    ("sym",),
    ("desc_act",),
    ("checkpoint_format", "format"),
    ("zero_point",),
    ("version",),
    ("pack_dtype",),
    ("dynamic",),
    ("quant_algo",),
    ("weight_block_size",),
    ("quantized_layers",),
)


@dataclass(frozen=True)
class Quantization:
    """What the config says of the weights of each module.

    Attributes:
        method: `quant_method`, or None for a checkpoint that is not quantised.
        scheme: module name -> WeightFormat, or None where the module is not quantised.
        activations: module name -> what its activations are quantised to, as `activations.py` names it.
    """

    method: str | None
    scheme: Scheme
    activations: ActivationScheme


def read_quantization(directory: Path, config: ModelConfig) -> Quantization:
    """The quantization of a checkpoint.

    Raises:
        ConfigError: a field is missing or malformed, or config.json and a side file disagree on what matters.
        UnsupportedError: an unknown quant_method, or a variant that fanfold does not run.
    """
    where = f"{config.path}: quantization_config"
    fields = _stated(config.quantization or {})
    default = None
    for side, stated, maker in _side_files(directory):
        for names in CHECKED:
            _compare(where, fields, side, stated, names)
        if not fields:
            where, default = side, maker
        fields = {**stated, **fields}
    if not fields:
        return Quantization(None, lambda module: None, weight_only)
    method = _first(fields, METHOD)
    method = default if method is None else method
    if not isinstance(method, str):
        raise ConfigError(
            f"{where}.quant_method",
            found=shown(method),
            expected=f"one of {', '.join(METHODS)}",
            next_step="Add the quant_method of the tool that wrote the weights.",
        )
    if method not in METHODS:
        raise UnsupportedError(
            f"{where}.quant_method",
            found=shown(method),
            expected=f"one of {', '.join(METHODS)}",
            next_step="Requantise the model to one of the formats in fanfold's README.",
        )
    stated = Fields(where, fields)
    scheme = METHODS[method](stated)
    return Quantization(method, scheme, SCHEMES.get(method, lambda _: weight_only)(stated))


def _side_files(directory: Path) -> list[tuple[str, dict[str, Any], str]]:
    """Path and fields of the side files that are there, and the quant_method of one that does not say."""
    found: list[tuple[str, dict[str, Any], str]] = []
    gptq_side = read_json_if_there(directory / GPTQ_SIDE)
    if gptq_side is not None:
        found.append((f"{directory / GPTQ_SIDE}", _stated(gptq_side), "gptq"))
    whole = read_json_if_there(directory / MODELOPT_SIDE)
    if whole is not None:
        inner = whole.get("quantization")
        if not isinstance(inner, dict):
            raise ConfigError(
                f"{directory / MODELOPT_SIDE}: quantization",
                found=shown(inner),
                expected="an object",
                next_step="Fetch the file again.",
            )
        stated = _stated(cast(dict[str, Any], inner))
        found.append((f"{directory / MODELOPT_SIDE}: quantization", stated, "modelopt"))
    return found


def _stated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if name in fields), None)


def _compare(
    where: str, fields: Mapping[str, Any], side: str, stated: Mapping[str, Any], names: tuple[str, ...]
) -> None:
    """Refuses two values of one field.

    Raises:
        ConfigError: names both files and both values.
    """
    ours, theirs = _first(fields, names), _first(stated, names)
    if ours is None or theirs is None or _plain(ours) == _plain(theirs):
        return
    raise ConfigError(
        f"{where}.{names[0]}",
        found=f"{shown(ours)}, but {side} says {shown(theirs)}",
        expected="one value in both files",
        next_step="Find out which file belongs to these weights and correct the other.",
    )


def _plain(value: object) -> object:
    """Case does not matter in names."""
    return value.lower() if isinstance(value, str) else value
