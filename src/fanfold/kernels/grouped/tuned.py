"""The user's tables of measured configs for the portable product, and which configs a layer runs with.

The package has no such table: `configs` holds what it knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fanfold.kernels.common import tables
from fanfold.kernels.grouped.configs import config_for, pinned_config
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.shape import ExpertShape
from fanfold.spec.weight_format import WeightFormat

KERNEL = "grouped"
INSTEAD = "configs are those of kernels/grouped/configs.py"


@dataclass(frozen=True)
class TunedGrouped:
    """The best configs found for one layer and number of tokens.

    Attributes:
        header: of the table.
        format: of gate_up and down, act-order aside, which is sorted by group when the layer is loaded.
        experts, top_k, hidden, intermediate, tokens: E, k, H, I, T.
        gate_up, down: configs; both have one block_t.
        us: microseconds of the whole layer; floor: the least that bytes and operations allow, 0 where not known.
    """

    header: tables.Header
    format: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int
    gate_up: LaunchConfig
    down: LaunchConfig
    us: dict[str, float]


@dataclass(frozen=True)
class GroupedConfigs:
    """What a layer runs with.

    Attributes:
        gate_up, down: configs; both have one block_t, that of the work list.
        row: of a table, where they come from; None: of `configs`.
    """

    gate_up: LaunchConfig
    down: LaunchConfig
    row: TunedGrouped | None


def read_table(path: Path) -> tuple[TunedGrouped, ...]:
    """Every row of a table.

    Raises:
        ConfigError: it is no such table; names the row and field.
    """
    header, rows = tables.read(path)
    return tuple(_row(header, f"layers[{i}]", row) for i, row in enumerate(rows))


@cache
def layer_configs(
    gate_up: WeightFormat,
    down: WeightFormat,
    shape: ExpertShape,
    dtype: torch.dtype,
    arch: int,
    tokens: int,
    top_k: int,
    w8a8: bool = False,
    pinned: bool = False,
    gpu: str | None = None,
) -> GroupedConfigs:
    """Configs of both products of a layer.

    Args:
        gate_up, down: formats of the weights.
        shape: E, H, I.
        dtype: of the activations.
        arch: compute capability, e.g. 90; 0 in the interpreter.
        tokens, top_k: T, k.
        w8a8: activations are quantised to 8 bits.
        pinned: batch-invariant mode, in which no table is asked.
        gpu: where it runs; None: any of the arch.
    """
    rows = tokens * top_k
    inputs = ((gate_up, shape.hidden, True), (down, shape.intermediate, False))
    if pinned:
        first, second = (pinned_config(fmt, k, dtype, arch, fused, w8a8) for fmt, k, fused in inputs)
        return GroupedConfigs(first, second, None)
    plain = replace(gate_up, act_order=False)
    if plain == replace(down, act_order=False) and shape.gated and dtype != torch.float32 and not w8a8:
        row = _nearest(plain.name, shape, arch, tokens, top_k, gpu)
        if row is not None:
            return GroupedConfigs(row.gate_up, row.down, row)
    first, second = (config_for(fmt, k, dtype, arch, rows, shape.num_experts, fused, w8a8) for fmt, k, fused in inputs)
    return GroupedConfigs(first, second, None)


@cache
def all_rows(gpu: str | None, arch: int) -> tuple[TunedGrouped, ...]:
    """The rows of the user's tables of an arch."""
    rows = (row for path in tables.user_tables(KERNEL, gpu) for row in read_table(path))
    return tuple(row for row in rows if row.header.arch == f"sm_{arch}")


def _nearest(fmt: str, shape: ExpertShape, arch: int, tokens: int, top_k: int, gpu: str | None) -> TunedGrouped | None:
    """The row of the layer with the nearest number of tokens, as far as it reaches."""
    layer = fmt, shape.num_experts, top_k, shape.hidden, shape.intermediate
    same = [
        row
        for row in all_rows(gpu, arch)
        if (row.format, row.experts, row.top_k, row.hidden, row.intermediate) == layer
    ]
    distance = {row.tokens: max(row.tokens, tokens) / max(1, min(row.tokens, tokens)) for row in same}
    near = [row for row in same if distance[row.tokens] <= tables.REACH]
    return min(near, key=lambda row: distance[row.tokens], default=None)


def _row(header: tables.Header, where: str, row: object) -> TunedGrouped:
    path = header.path
    kinds: dict[str, type] = {"format": str, **dict.fromkeys(tables.SIZES, int)}
    found = tables.record(path, where, row, {**kinds, "gate_up": dict, "down": dict, "us": dict})
    us = tables.record(path, f"{where}.us", found["us"], {"layer": float, "floor": float})
    gate_up, down = tables.configs(LaunchConfig, path, where, found)
    tables.check_sizes(path, where, found)
    made: Mapping[str, Any] = {**found, "us": us, "gate_up": gate_up, "down": down}
    return TunedGrouped(header, **made)
