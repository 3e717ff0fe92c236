"""Rows of `fanfold bench` in files, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fanfold.cli.output import finite
from fanfold.errors import ArgumentError


def append(file: Path, row: dict[str, Any]) -> None:
    """One line more."""
    with file.open("a") as lines:
        lines.write(json.dumps(finite(row), allow_nan=False) + "\n")


def read(file: Path, shapes: Sequence[str] | None, formats: Sequence[str] | None) -> list[dict[str, Any]]:
    """The rows of a file, or those of some shapes and formats.

    Raises:
        ArgumentError: it holds none of them, or something else.
    """
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
        found = [
            r for r in rows if r["shape"] in (shapes or [r["shape"]]) and r["format"] in (formats or [r["format"]])
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            "--rows", found=f"{file}: {error}", expected="rows of fanfold bench", next_step="Pass an --out file."
        ) from error
    if not found:
        raise ArgumentError(
            "--rows",
            found=f"{len(rows)} rows in {file}, none of these shapes and formats",
            expected="at least one",
            next_step="Name shapes and formats as the rows do.",
        )
    return found
