"""The table of measured configs: kernels/tuned/grouped_int4_sm90.json, read and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from fanfold.errors import ArgumentError, ConfigError
from fanfold.kernels.grouped.sm90.config import Sm90Config

TABLE = Path(__file__).parents[2] / "tuned" / "grouped_int4_sm90.json"
HEADER = {"kernel": str, "gpu": str, "dtype": str, "measured": str, "torch": str, "triton": str}
FAMILIES = ("int4", "nvfp4", "mxfp4")
SIZES = ("experts", "top_k", "hidden", "intermediate", "tokens")
TIMES = ("layer", "plan", "gate_up", "down", "sum", "floor")


@dataclass(frozen=True)
class TunedLayer:
    """The best configs found for one layer and number of tokens.

    Attributes:
        format: "int4" (any integers), "nvfp4" or "mxfp4".
        experts, top_k, hidden, intermediate, tokens: E, k, H, I, T.
        chained: launch with `chained`.
        gate_up, down: configs; both have one block_t.
        us: microseconds of the whole layer and its steps; floor: the least that bytes and operations allow.
        run: number of the run in benchmarks/results.
    """

    format: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    tokens: int
    chained: bool
    gate_up: Sm90Config
    down: Sm90Config
    us: dict[str, float]
    run: int


def read_table(path: Path = TABLE) -> tuple[TunedLayer, ...]:
    """Every row of the table.

    Args:
        path: a file like `TABLE`.

    Raises:
        ConfigError: it is no such table; names the row and field.
    """
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _wrong(path, "file", str(error), "JSON") from error
    layers = _record(path, "table", table, {**HEADER, "layers": list})["layers"]
    return tuple(_layer(path, f"layers[{i}]", row) for i, row in enumerate(layers))


def _layer(path: Path, where: str, row: object) -> TunedLayer:
    sizes: dict[str, type] = dict.fromkeys(SIZES, int)
    found = _record(
        path,
        where,
        row,
        {"format": str, **sizes, "chained": bool, "gate_up": dict, "down": dict, "us": dict, "run": int},
    )
    us = _record(path, f"{where}.us", found["us"], dict.fromkeys(TIMES, float))
    gate_up, down = (_config(path, f"{where}.{name}", found[name]) for name in ("gate_up", "down"))
    if gate_up.block_t != down.block_t:
        raise _wrong(path, f"{where}.down.block_t", str(down.block_t), f"{gate_up.block_t}, that of gate_up")
    if found["format"] not in FAMILIES:
        raise _wrong(path, f"{where}.format", repr(found["format"]), f"one of {FAMILIES}")
    for name in SIZES:
        if found[name] < 1:
            raise _wrong(path, f"{where}.{name}", str(found[name]), "a positive number")
    made: dict[str, Any] = {**found, "us": us, "gate_up": gate_up, "down": down}
    return TunedLayer(**made)


def _config(path: Path, where: str, row: object) -> Sm90Config:
    kinds = {field.name: bool if field.name == "scale_on_sum" else int for field in fields(Sm90Config)}
    try:
        return Sm90Config(**_record(path, where, row, kinds))
    except ArgumentError as error:
        raise _wrong(path, f"{where}: {error.what}", error.found, error.expected) from error


def _record(path: Path, where: str, row: object, kinds: dict[str, type]) -> dict[str, Any]:
    """The row, with exactly these fields of these types (an int is not a bool)."""
    if not isinstance(row, dict):
        raise _wrong(path, where, type(row).__name__, "an object")
    found = cast(dict[str, Any], row)
    if set(found) != set(kinds):
        raise _wrong(path, where, f"fields {sorted(found)}", f"{sorted(kinds)}")
    for name, kind in kinds.items():
        if type(found[name]) is not kind:
            raise _wrong(path, f"{where}.{name}", repr(found[name]), kind.__name__)
    return found


def _wrong(path: Path, what: str, found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{path.name}: {what}", found=found, expected=expected, next_step="Write the table as `TunedLayer` has it."
    )
