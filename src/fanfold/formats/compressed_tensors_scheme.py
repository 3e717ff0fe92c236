"""compressed-tensors' config: groups of targets, each with its own weights and format.

Which group a module belongs to is decided as that library does: a target that is the module's name comes before a
pattern (`re:...`), a pattern before the class (`Linear`); ignored modules belong to none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from fanfold.errors import UnsupportedError
from fanfold.formats.config_fields import Fields
from fanfold.formats.schemes import Scheme
from fanfold.formats.values import shown
from fanfold.spec.weight_format import WeightFormat

T = TypeVar("T")
CLASS = "Linear"  # the class of every module that holds a matrix
BLOCKS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}


def compressed_tensors(config: Fields) -> Scheme:
    """The scheme of a compressed-tensors config.

    Raises:
        ConfigError: a field is missing or malformed.
        UnsupportedError: a format that fanfold does not run, or weights that are also sparse or rotated.
    """
    _refuse_transforms(config)
    return by_target(config, lambda group: _format(group, group.text("format", config.text("format", "dense"))))


def by_target(config: Fields, of_group: Callable[[Fields], T | None]) -> Callable[[str], T | None]:
    """Module name -> what `of_group` says of the module's group; None for modules of none.

    Raises:
        ConfigError: a field is missing or malformed.
    """
    ignored_names, ignored_patterns, all_ignored = _sorted_targets(config, "ignore")
    by_name: dict[str, T | None] = {}
    by_pattern: list[tuple[str, re.Pattern[str], T | None]] = []
    by_class: T | None = None
    entries = config.object("config_groups")
    for key in entries.values:
        group = entries.object(key)
        names, patterns, everything = _sorted_targets(group, "targets")
        found = of_group(group)
        by_name.update(dict.fromkeys(names, found))
        by_pattern += [(pattern.pattern, pattern, found) for pattern in patterns]
        by_class = found if everything else by_class
    by_pattern.sort(key=lambda entry: entry[0])

    def find(module: str) -> T | None:
        if all_ignored or module in ignored_names or any(p.match(module) for p in ignored_patterns):
            return None
        if module in by_name:
            return by_name[module]
        return next((found for _, pattern, found in by_pattern if pattern.match(module)), by_class)

    return find


def _sorted_targets(config: Fields, field: str) -> tuple[set[str], list[re.Pattern[str]], bool]:
    """Module names, patterns, and whether the class of all matrices is among them."""
    targets = config.names(field)
    patterns = [config.pattern(field, t.removeprefix("re:")) for t in targets if t.startswith("re:")]
    return {t for t in targets if not t.startswith("re:")}, patterns, CLASS in targets


def _refuse_transforms(config: Fields) -> None:
    if config.values.get("transform_config"):
        raise config.unsupported("transform_config", "no rotations of weights or activations")
    if config.values.get("sparsity_config"):
        sparsity = config.object("sparsity_config")
        if sparsity.text("format", "dense") != "dense":
            raise sparsity.unsupported("format", "dense, no sparse storage")


def _format(group: Fields, layout: str) -> WeightFormat | None:
    if not group.has("weights") or layout == "dense":
        return None
    weights = group.object("weights")
    bits, kind, strategy = weights.integer("num_bits"), weights.text("type"), weights.text("strategy").lower()
    if layout == "pack-quantized" and kind == "int":
        if strategy not in ("group", "channel"):
            raise weights.unsupported("strategy", "group or channel")
        return WeightFormat(
            "packed",
            weights.bits("num_bits", "packed"),
            group_size=weights.group_size() if strategy == "group" else -1,
            symmetric=weights.flag("symmetric", True),
            # "group" (and true, its older spelling) stores g_idx; "weight" and "static" need none.
            act_order=weights.values.get("actorder") is True or weights.values.get("actorder") == "group",
        )
    if layout in BLOCKS and (bits, kind) == (4, "float"):
        if weights.group_size() != BLOCKS[layout]:
            raise weights.unsupported("group_size", str(BLOCKS[layout]))
        return WeightFormat.parse("nvfp4-divisor" if layout.startswith("nv") else "mxfp4")
    if layout in ("float-quantized", "naive-quantized") and (bits, kind) == (8, "float"):
        if strategy == "block":
            return WeightFormat("fp8", 8, block=weights.block("block_structure"))
        if strategy not in ("tensor", "channel"):
            raise weights.unsupported("strategy", "tensor, channel or block")
        return WeightFormat("fp8", 8, block=(-1, -1) if strategy == "tensor" else (1, -1))
    raise UnsupportedError(
        f"{group.where}.format",
        found=f"{shown(layout)} with weights of type {shown(kind)}, {shown(bits)} bits",
        expected="pack-quantized (int), nvfp4-pack-quantized, mxfp4-pack-quantized, or float-quantized with 8 bits",
        next_step="Requantise the model to one of the formats in fanfold's README.",
    )
