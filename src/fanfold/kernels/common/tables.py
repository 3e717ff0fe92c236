"""Tables of measured configs: where they lie, the user's before the package's, and what all of them have in common."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, cast

from fanfold.errors import ArgumentError, ConfigError

LOG = logging.getLogger("fanfold")
PACKAGE = Path(__file__).parents[1] / "tuned"
VARIABLE = "FANFOLD_TUNED"
HEADER = {"kernel": str, "gpu": str, "arch": str, "dtype": str, "measured": str, "torch": str, "triton": str}
SIZES = ("experts", "top_k", "hidden", "intermediate", "tokens")
REACH = 4
"""A row serves as many times more tokens, or fewer."""


class _Config(Protocol):
    """A dataclass of tile sizes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def block_t(self) -> int: ...


Config = TypeVar("Config", bound=_Config)


@dataclass(frozen=True)
class Header:
    """Where the rows of a table were measured, and when.

    Attributes:
        path: the file.
        kernel: what they are for.
        gpu, arch: e.g. "NVIDIA H200", "sm_90".
        dtype: of the activations.
        measured: days, e.g. "2026-12-01".
        torch, triton: versions.
    """

    path: Path
    kernel: str
    gpu: str
    arch: str
    dtype: str
    measured: str
    torch: str
    triton: str


def user_folder() -> Path:
    """Where `fanfold tune` writes: $FANFOLD_TUNED, else fanfold/tuned in $XDG_DATA_HOME or ~/.local/share."""
    given, data = os.environ.get(VARIABLE), os.environ.get("XDG_DATA_HOME")
    if given:
        return Path(given)
    # Path.home() fails for a user without a home, who has no tables either.
    return (Path(data) if data else Path(os.path.expanduser("~/.local/share"))) / "fanfold" / "tuned"  # noqa: PTH111


def user_table(kernel: str, gpu: str) -> Path:
    """The user's table of a kernel on a GPU of that name."""
    return user_folder() / re.sub(r"[^A-Za-z0-9]+", "-", gpu).strip("-") / f"{kernel}.json"


def user_tables(kernel: str, gpu: str | None) -> list[Path]:
    """The user's tables of a kernel: that of a GPU, or, of none in particular, those of all."""
    if gpu is None:
        return sorted(user_folder().glob(f"*/{kernel}.json"))
    path = user_table(kernel, gpu)
    return [path] if path.exists() else []


def read(path: Path) -> tuple[Header, list[object]]:
    """Header and rows of a table, the rows as they stand.

    Raises:
        ConfigError: it is no table.
    """
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise wrong(path, "file", str(error), "JSON") from error
    found = record(path, "table", table, {**HEADER, "layers": list})
    return Header(path, **{name: found[name] for name in HEADER}), found["layers"]


def check_sizes(path: Path, where: str, row: Mapping[str, Any]) -> None:
    """Whether the sizes of a row are positive.

    Raises:
        ConfigError: one is not.
    """
    for name in SIZES:
        if row[name] < 1:
            raise wrong(path, f"{where}.{name}", str(row[name]), "a positive number")


def record(
    path: Path, where: str, row: object, kinds: Mapping[str, type], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The row, with exactly these fields of these types (an int is not a bool); the optional ones may be missing."""
    if not isinstance(row, dict):
        raise wrong(path, where, type(row).__name__, "an object")
    found = cast("dict[str, Any]", row)
    if set(found) | set(optional) != set(kinds):
        raise wrong(path, where, f"fields {sorted(found)}", f"{sorted(kinds)}")
    for name, value in found.items():
        if type(value) is not kinds[name]:
            raise wrong(path, f"{where}.{name}", repr(value), kinds[name].__name__)
    return found


def wrong(path: Path, what: str, found: str, expected: str) -> ConfigError:
    """What to raise for a table that is none."""
    return ConfigError(
        f"{path.name}: {what}",
        found=found,
        expected=expected,
        next_step=f"Remove {path}, or have it written anew: fanfold tune.",
    )


def configs(kind: type[Config], path: Path, where: str, row: Mapping[str, Any]) -> tuple[Config, Config]:
    """The configs `gate_up` and `down` of a row, which share one work list.

    Args:
        kind: their dataclass, of numbers but for `scale_on_sum`.
        path, where: the table and the row, for errors.
        row: of the table.

    Raises:
        ConfigError: one that no kernel has, or unlike tiles of rows.
    """
    kinds = {field.name: bool if field.name == "scale_on_sum" else int for field in fields(kind)}

    def one(name: str) -> Config:
        try:
            return kind(**record(path, f"{where}.{name}", row[name], kinds))
        except ArgumentError as error:
            raise wrong(path, f"{where}.{name}: {error.what}", error.found, error.expected) from error

    gate_up, down = one("gate_up"), one("down")
    if gate_up.block_t != down.block_t:
        raise wrong(path, f"{where}.down.block_t", str(down.block_t), f"{gate_up.block_t}, that of gate_up")
    return gate_up, down


@cache
def note_missing(gpu: str, fmt: str, layer: tuple[int, int, int, int], instead: str) -> None:
    """One line for a layer that no table has, with the command that measures it.

    Args:
        gpu: where it runs.
        fmt: of the weights.
        layer: E, k, H, I.
        instead: where its configs come from.
    """
    command = f"fanfold tune --shape {','.join(map(str, layer))} --format {fmt}"
    LOG.info("no tuned row for %s experts of this shape on %s, so %s; `%s` makes some", fmt, gpu, instead, command)
