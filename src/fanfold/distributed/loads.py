"""Placements of a whole model by the loads that `fanfold routing --json` has counted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from fanfold.distributed.placement import Placement
from fanfold.errors import ArgumentError, CorruptFileError, MissingFileError


def placements_by_load(
    file: str | Path, ranks: int, copies: int = 0, adapter: str | None = None
) -> dict[int, Placement]:
    """A placement for every layer: see Placement.by_load.

    Args:
        file: what `fanfold routing --json` printed; the same on all ranks.
        ranks: how many.
        copies: of experts, in each layer.
        adapter: of the run whose counts are taken; None for the base.

    Returns:
        Layer -> placement, for ExpertPlan.

    Raises:
        MissingFileError, CorruptFileError: there is no such file, or it is no report of that command.
        ArgumentError: it has no run of that adapter, or Placement.by_load refuses ranks or copies.
    """
    runs = _runs(Path(file))
    names = [run["adapter"] for run in runs]
    if adapter not in names:
        raise ArgumentError(
            f"{file}: adapter",
            found=repr(adapter),
            expected=f"one of {', '.join(repr(name) for name in names)}",
            next_step="Run `fanfold routing --json` with that adapter, or take the base's counts.",
        )
    layers = runs[names.index(adapter)]["layers"]
    return {layer["layer"]: Placement.by_load(layer["counts"], ranks, copies) for layer in layers}


def _runs(file: Path) -> list[Mapping[str, Any]]:
    try:
        report: Any = json.loads(file.read_text(encoding="utf-8"))
        runs = cast("list[Mapping[str, Any]]", report["runs"])
        counted = [layer["counts"] for run in runs for layer in run["layers"] if run["adapter"] or layer["layer"] >= 0]
    except OSError as error:
        raise MissingFileError(
            str(file),
            found=error.strerror or "an error",
            expected="what `fanfold routing --json` printed",
            next_step="Run it on a text like those that will be served, and keep its output.",
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptFileError(
            str(file),
            found=f"no report ({type(error).__name__}: {error})",
            expected="what `fanfold routing --json` printed",
            next_step="Run it again; `fanfold routing --json` writes nothing else to its output.",
        ) from error
    if not counted:
        raise CorruptFileError(
            str(file),
            found="a report without layers",
            expected="counts of every layer with experts",
            next_step="Run `fanfold routing --json` on a model with experts.",
        )
    return runs
