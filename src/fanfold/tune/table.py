"""Table: the user's, a row at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fanfold.kernels.common.tables import SIZES, read
from fanfold.kernels.grouped import tuned as grouped
from fanfold.kernels.grouped.sm90 import configs as sm90_configs
from fanfold.kernels.grouped.sm90 import tuned as sm90


def write_row(path: Path, header: Mapping[str, str], row: Mapping[str, Any]) -> None:
    """Puts a row into a table, in the place of one for the same layer; layers read it from then on.

    The file is whole at any time: it is written beside and moved into place.

    Args:
        path: the file; made where it is missing.
        header: all but the day.
        row: as tables have it.
    """
    rows: list[Any] = read(path)[1] if path.exists() else []
    kept = [other for other in rows if _key(other) != _key(row)]
    layers = sorted([*kept, row], key=_key)
    table = {**header, "measured": datetime.now(UTC).date().isoformat(), "layers": layers}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(table, indent=1) + "\n")
    beside.replace(path)
    forget()


def forget() -> None:
    """Lets layers of this process read tables anew."""
    for cached in (grouped.all_rows, grouped.layer_configs, sm90.all_rows, sm90_configs.layer_configs):
        cached.cache_clear()


def _key(row: Any) -> tuple[Any, ...]:
    return (row["format"], *(row[name] for name in SIZES))
