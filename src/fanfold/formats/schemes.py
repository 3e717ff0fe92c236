"""Schemes: what each quantiser's config says of a module's weights.

One function a `quant_method`; each takes the config's object and gives a function module name -> WeightFormat, or None
where the module is not quantised. What only the file can tell is left open: `act_order` (g_idx tells), and the block of
ModelOpt's FP8_PB_WO (`block=None`; the shape of the scales tells).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.spec.weight_format import WeightFormat

Scheme = Callable[[str], WeightFormat | None]


@dataclass(frozen=True)
class Fields:
    """Typed access to one object of a config; `where` names it in messages."""

    where: str
    values: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, "a whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def names(self, *names: str) -> list[str]:
        """The first of these fields that is there, as a list of strings; empty where none is."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, list) or not all(isinstance(v, str) for v in cast(list[Any], value)):
                raise self.error(name, "a list of module names")
            return cast(list[str], value)
        return []

    def object(self, name: str) -> Fields:
        """An object inside."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(f"{self.where}.{name}", cast(dict[str, Any], value))

    def error(self, name: str, expected: str) -> ConfigError:
        """What to raise for a field that is not what it should be."""
        return ConfigError(
            f"{self.where}.{name}",
            found=repr(self.values.get(name)),
            expected=expected,
            next_step="Correct the quantization config, or fetch it again.",
        )

    def unsupported(self, name: str, expected: str) -> UnsupportedError:
        """What to raise for a field that means something fanfold does not run."""
        return UnsupportedError(
            f"{self.where}.{name}",
            found=repr(self.values.get(name)),
            expected=expected,
            next_step="Requantise the model to one of the formats in fanfold's README.",
        )


def gptq(config: Fields) -> Scheme:
    """GPTQ; `checkpoint_format` (older: `format`) gptq stores zero - 1, gptq_v2 the zero; missing means gptq."""
    name = "checkpoint_format" if config.values.get("checkpoint_format") is not None else "format"
    layout = config.text(name, "gptq").lower()
    if layout not in ("gptq", "gptq_v2"):
        raise config.unsupported(name, "gptq or gptq_v2")
    if config.text("pack_dtype", "int32") != "int32":
        raise config.unsupported("pack_dtype", "int32")
    dynamic: list[tuple[re.Pattern[str], Fields | None]] = []
    if config.values.get("dynamic"):
        overrides = config.object("dynamic")
        for key in overrides.values:
            pattern = compiled(overrides, key, key.removeprefix("-:").removeprefix("+:"))
            dynamic.append((pattern, None if key.startswith("-:") else overrides.object(key)))

    def format_of(fields: Fields) -> WeightFormat:
        symmetric = fields.flag("sym", True)
        return WeightFormat(
            "gptq",
            fields.integer("bits"),
            group_size=fields.integer("group_size"),
            symmetric=symmetric,
            zero_point="v2" if layout == "gptq_v2" else "v1",
        )

    common = format_of(config)

    def scheme(module: str) -> WeightFormat | None:
        for pattern, override in dynamic:
            if pattern.match(module):
                if override is None:
                    return None
                return format_of(Fields(override.where, {**config.values, **override.values}))
        return common

    return scheme


def awq(config: Fields) -> Scheme:
    """AWQ in the gemm layout."""
    for name in ("version", "format", "checkpoint_format"):
        if config.text(name, "gemm").lower() != "gemm":
            raise config.unsupported(name, "gemm")
    skipped = config.names("modules_to_not_convert")
    common = WeightFormat(
        "awq",
        config.integer("bits"),
        group_size=config.integer("group_size"),
        symmetric=not config.flag("zero_point", True),
    )
    return lambda module: None if any(part in module for part in skipped) else common


def compressed_tensors(config: Fields) -> Scheme:
    """compressed-tensors: groups of targets, each with its own weights and format."""
    ignored = [_target(config, "ignore", name) for name in config.names("ignore")]
    groups: list[tuple[list[Callable[[str], bool]], WeightFormat | None]] = []
    entries = config.object("config_groups")
    for key in entries.values:
        group = entries.object(key)
        targets = [_target(group, "targets", name) for name in group.names("targets")]
        layout = group.text("format", config.text("format", "dense"))
        groups.append((targets, _compressed_format(group, layout)))

    def scheme(module: str) -> WeightFormat | None:
        if any(matches(module) for matches in ignored):
            return None
        for targets, fmt in groups:
            if any(matches(module) for matches in targets):
                return fmt
        return None

    return scheme


def _target(config: Fields, field: str, name: str) -> Callable[[str], bool]:
    """A target or ignored name: `re:PATTERN`, a module's name or its end, or a class ("Linear": every module here)."""
    if name.startswith("re:"):
        pattern = compiled(config, field, name.removeprefix("re:"))
        return lambda module: pattern.match(module) is not None
    if name == "Linear":
        return lambda module: True
    return lambda module: module == name or module.endswith("." + name)


def _compressed_format(group: Fields, layout: str) -> WeightFormat | None:
    if group.values.get("weights") is None or layout == "dense":
        return None
    weights = group.object("weights")
    strategy = weights.text("strategy")
    size = weights.integer("group_size", -1)
    bits = weights.integer("num_bits")
    if layout == "pack-quantized":
        if strategy not in ("group", "channel"):
            raise weights.unsupported("strategy", "group or channel")
        return WeightFormat(
            "packed",
            bits,
            group_size=size if strategy == "group" else -1,
            symmetric=weights.flag("symmetric", True),
        )
    if layout in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        expected = 16 if layout.startswith("nv") else 32
        if size != expected:
            raise weights.unsupported("group_size", str(expected))
        return WeightFormat.parse("nvfp4-divisor" if layout.startswith("nv") else "mxfp4")
    if layout in ("float-quantized", "naive-quantized") and weights.text("type") == "float" and bits == 8:
        if strategy == "block":
            return WeightFormat("fp8", 8, block=_block(weights, "block_structure"))
        if strategy not in ("tensor", "channel"):
            raise weights.unsupported("strategy", "tensor, channel or block")
        return WeightFormat("fp8", 8, block=(-1, -1) if strategy == "tensor" else (1, -1))
    raise UnsupportedError(
        f"{group.where}.format",
        found=f"{layout} with {bits}-bit {weights.values.get('type')}",
        expected="pack-quantized, nvfp4-pack-quantized, mxfp4-pack-quantized, or float-quantized with 8 bits",
        next_step="Requantise the model to one of the formats in fanfold's README.",
    )


def _block(config: Fields, name: str) -> tuple[int, int]:
    value: object = config.values.get(name)
    if isinstance(value, str):
        value = [int(part) if part.isdigit() else part for part in value.split("x")]
    if not isinstance(value, (list, tuple)):
        raise config.error(name, "two positive numbers")
    sizes = cast(Sequence[object], value)
    if len(sizes) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in sizes):
        raise config.error(name, "two positive numbers")
    rows, columns = cast(Sequence[int], sizes)
    return rows, columns


MODELOPT = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "FP8": "fp8-tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel",
}


def modelopt(config: Fields) -> Scheme:
    """ModelOpt: one `quant_algo` for all modules but the excluded ones, or one a module (MIXED_PRECISION)."""
    excluded = config.names("exclude_modules", "ignore")
    if config.text("quant_algo").upper() == "MIXED_PRECISION":
        layers = config.object("quantized_layers")
        formats = {name: _modelopt_format(layers.object(name)) for name in layers.values}
        return formats.get
    common = _modelopt_format(config)
    return lambda module: None if any(fnmatchcase(module, pattern) for pattern in excluded) else common


def _modelopt_format(config: Fields) -> WeightFormat:
    algorithm = config.text("quant_algo").upper()
    if algorithm == "FP8_PB_WO":
        stated = config.values.get("weight_block_size") is not None
        return WeightFormat("fp8", 8, block=_block(config, "weight_block_size") if stated else None)
    name = MODELOPT.get(algorithm)
    if name is None:
        raise config.unsupported("quant_algo", f"{', '.join(MODELOPT)}, FP8_PB_WO or MIXED_PRECISION")
    fmt = WeightFormat.parse(name)
    if fmt.group_size != -1 and config.values.get("group_size") not in (None, fmt.group_size):
        raise config.unsupported("group_size", str(fmt.group_size))
    return fmt


def fp8(config: Fields) -> Scheme:
    """Fine-grained FP8 (DeepSeek, transformers): blocks of `weight_block_size`, or one scale a matrix without it."""
    skipped = config.names("modules_to_not_convert", "ignored_layers")
    stated = config.values.get("weight_block_size") is not None
    common = WeightFormat("fp8", 8, block=_block(config, "weight_block_size") if stated else (-1, -1))
    return lambda module: None if any(_inside(module, name) for name in skipped) else common


def mxfp4(config: Fields) -> Scheme:
    """gpt-oss's MXFP4."""
    skipped = config.names("modules_to_not_convert")
    common = WeightFormat.parse("mxfp4")
    return lambda module: None if any(_inside(module, name) for name in skipped) else common


def _inside(module: str, name: str) -> bool:
    """Whether the module is `name` (with `*` for anything), or lies inside it."""
    return fnmatchcase(module, name) or fnmatchcase(module, f"{name}.*") or fnmatchcase(module, f"*.{name}")


def compiled(config: Fields, field: str, pattern: str) -> re.Pattern[str]:
    """A pattern of the config.

    Raises:
        ConfigError: it is no regular expression.
    """
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{config.where}.{field}",
            found=f"{pattern!r} ({error})",
            expected="a regular expression",
            next_step="Correct the quantization config, or fetch it again.",
        ) from error
