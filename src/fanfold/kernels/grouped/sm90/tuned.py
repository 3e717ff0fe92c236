"""Tables of measured configs: kernels/tuned/grouped_int4_sm90.json and those of the user, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fanfold.kernels.common import tables
from fanfold.kernels.grouped.sm90.config import Sm90Config

KERNEL = "grouped_int4_sm90"
TABLE = tables.PACKAGE / f"{KERNEL}.json"
FAMILIES = ("int4", "nvfp4", "mxfp4")
TIMES = ("layer", "floor", "plan", "gate_up", "down", "sum")
STEPS = TIMES[2:]
"""What `fanfold tune` does not measure."""


@dataclass(frozen=True)
class TunedLayer:
    """The best configs found for one layer and number of tokens.

    Attributes:
        header: of the table.
        format: "int4" (any integers), "nvfp4" or "mxfp4".
        experts, top_k, hidden, intermediate, tokens: E, k, H, I, T.
        chained: launch with `chained`.
        gate_up, down: configs; both have one block_t.
        us: microseconds of the whole layer and, where measured, its steps; floor: the least that bytes and operations
            allow.
        run: number of the run in benchmarks/results; 0: `fanfold tune`.
    """

    header: tables.Header
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
    header, rows = tables.read(path)
    return tuple(_layer(header, f"layers[{i}]", row) for i, row in enumerate(rows))


@cache
def all_rows(gpu: str | None, pinned: bool) -> tuple[TunedLayer, ...]:
    """The rows that a layer may run with, the user's first.

    Args:
        gpu: where it runs; None: any of sm_90.
        pinned: batch-invariant mode, where a user's table changes nothing.
    """
    own = [] if pinned else tables.user_tables(KERNEL, gpu)
    return tuple(row for path in (*own, TABLE) for row in read_table(path))


def _layer(header: tables.Header, where: str, row: object) -> TunedLayer:
    path = header.path
    sizes: dict[str, type] = dict.fromkeys(tables.SIZES, int)
    configs: dict[str, type] = {"gate_up": dict, "down": dict}
    kinds = {"format": str, **sizes, "chained": bool, **configs, "us": dict, "run": int}
    found = tables.record(path, where, row, kinds)
    us = tables.record(path, f"{where}.us", found["us"], dict.fromkeys(TIMES, float), STEPS)
    gate_up, down = tables.configs(Sm90Config, path, where, found)
    if found["format"] not in FAMILIES:
        raise tables.wrong(path, f"{where}.format", repr(found["format"]), f"one of {FAMILIES}")
    tables.check_sizes(path, where, found)
    made: dict[str, Any] = {**found, "us": us, "gate_up": gate_up, "down": down}
    return TunedLayer(header, **made)
