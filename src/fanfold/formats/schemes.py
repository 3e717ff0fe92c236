"""Schemes: what each quantiser's config says of a module's weights.

One function a `quant_method`; each takes the config's object and gives a function module name -> WeightFormat, or None
where the module is not quantised. What only the file can tell is left open: whether a GPTQ or compressed-tensors matrix
is act-ordered (`act_order` here means that it must have a g_idx), and the block of ModelOpt's FP8_PB_WO (`block=None`;
the shape of the scales tells). compressed-tensors and ModelOpt have files of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import cast

from fanfold.errors import ConfigError
from fanfold.formats.config_fields import Fields
from fanfold.spec.weight_format import WeightFormat

Scheme = Callable[[str], WeightFormat | None]


def gptq(config: Fields) -> Scheme:
    """GPTQ; `checkpoint_format` (older: `format`) gptq stores zero - 1, gptq_v2 the zero; missing means gptq.

    `dynamic` maps patterns of module names to overrides (`-:` skips the module); the first that matches counts.
    """
    layout = _gptq_layout(config)
    if config.text("pack_dtype", "int32") != "int32":
        raise config.unsupported("pack_dtype", "int32")
    common = _gptq_format(config, layout)
    dynamic: list[tuple[re.Pattern[str], WeightFormat | None]] = []
    overrides = config.object("dynamic") if config.has("dynamic") else Fields(config.where, {})
    for key in overrides.values:
        pattern = overrides.pattern(key, key.removeprefix("-:").removeprefix("+:"))
        fmt = None
        if not key.startswith("-:"):
            override = overrides.object(key)
            fmt = _gptq_format(Fields(override.where, {**config.values, **override.values}), layout)
        dynamic.append((pattern, fmt))
    quantised = _gptq_modules(config)

    def scheme(module: str) -> WeightFormat | None:
        if quantised and not any(module.endswith("." + name) for name in quantised):
            return None
        for pattern, fmt in dynamic:
            if pattern.match(module):
                return fmt
        return common

    return scheme


def _gptq_layout(config: Fields) -> str:
    stated = {name: config.text(name).lower() for name in ("checkpoint_format", "format") if config.has(name)}
    for name, layout in stated.items():
        if layout not in ("gptq", "gptq_v2"):
            raise config.unsupported(name, "gptq or gptq_v2")
    if len(set(stated.values())) > 1:
        raise ConfigError(
            config.where,
            found=", ".join(f"{name} = {layout}" for name, layout in stated.items()),
            expected="one of the two in both",
            next_step="Find out which one these weights have (gptq stores zero - 1) and correct the other.",
        )
    return next(iter(stated.values()), "gptq")


def _gptq_format(config: Fields, layout: str) -> WeightFormat:
    group_size = config.group_size()
    return WeightFormat(
        "gptq",
        config.bits("bits", "gptq"),
        group_size=group_size,
        symmetric=config.flag("sym", True),
        zero_point="v2" if layout == "gptq_v2" else "v1",
        act_order=config.flag("desc_act", False) and group_size != -1,  # the order of one group says nothing
    )


def _gptq_modules(config: Fields) -> list[str]:
    """`modules_in_block_to_quantize`: lists of the names, inside a layer, of the only modules that are quantised."""
    value: object = config.values.get("modules_in_block_to_quantize") or []
    if not isinstance(value, list):
        raise config.error("modules_in_block_to_quantize", "lists of module names")
    names: list[object] = []
    for entry in cast(list[object], value):
        names.extend(cast(list[object], entry) if isinstance(entry, list) else [entry])
    if not all(isinstance(name, str) for name in names):
        raise config.error("modules_in_block_to_quantize", "lists of module names")
    return cast(list[str], names)


def awq(config: Fields) -> Scheme:
    """AWQ in the gemm layout."""
    for name in ("version", "format", "checkpoint_format"):
        if config.text(name, "gemm").lower() != "gemm":
            raise config.unsupported(name, "gemm")
    if config.text("backend", "autoawq").lower() == "llm-awq":
        raise config.unsupported("backend", "another backend; llm-awq writes a layout of its own")
    skipped = config.names("modules_to_not_convert")
    common = WeightFormat(
        "awq",
        config.bits("bits", "awq"),
        group_size=config.group_size(),
        symmetric=not config.flag("zero_point", True),
    )
    return lambda module: None if any(part in module for part in skipped) else common


def fp8(config: Fields) -> Scheme:
    """Fine-grained FP8 (DeepSeek, transformers): blocks of `weight_block_size`, or one scale a matrix without it."""
    skipped = config.names("modules_to_not_convert", "ignored_layers")
    block = config.block("weight_block_size") if config.has("weight_block_size") else (-1, -1)
    common = WeightFormat("fp8", 8, block=block)
    return lambda module: None if any(_inside(module, name) for name in skipped) else common


def mxfp4(config: Fields) -> Scheme:
    """gpt-oss's MXFP4."""
    skipped = config.names("modules_to_not_convert")
    common = WeightFormat.parse("mxfp4")
    return lambda module: None if any(_inside(module, name) for name in skipped) else common


def _inside(module: str, name: str) -> bool:
    """Whether the module is `name` (with `*` for anything, from any level on), or lies inside it."""
    dotted = f".{module}."
    return fnmatchcase(dotted, f"*.{name}.*")
