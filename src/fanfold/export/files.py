"""The files of an export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fanfold.export.c_source import header, source
from fanfold.export.compile import Compiled
from fanfold.export.manifest import schema_text, to_json
from fanfold.export.paths import HEADER, MANIFEST, SCHEMA, SOURCE, cubin_path, ptx_path


def write(folder: Path, compiled: Sequence[Compiled], made: dict[str, Any]) -> None:
    """Kernels, launcher, schema, and the manifest `made` last, so that a folder without one is not complete."""
    for found in compiled:
        (folder / ptx_path(found.kernel)).parent.mkdir(parents=True, exist_ok=True)
        (folder / ptx_path(found.kernel)).write_text(found.ptx, encoding="utf-8")
        (folder / cubin_path(found.kernel)).write_bytes(found.cubin)
    (folder / HEADER).write_text(header(compiled), encoding="utf-8")
    (folder / SOURCE).write_text(source(compiled), encoding="utf-8")
    (folder / SCHEMA).write_text(schema_text(), encoding="utf-8")
    (folder / MANIFEST).write_text(to_json(made), encoding="utf-8")
