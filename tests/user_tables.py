"""Tables as `fanfold tune` writes them, in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fanfold.kernels.common.tables import user_table
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.spec.launch import LaunchConfig
from fanfold.tune.table import forget, write_row

H200 = "NVIDIA H200"


@contextmanager
def user_folder(folder: Path) -> Iterator[None]:
    """Tables of that folder are read meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FANFOLD_TUNED", str(folder))
        forget()
        try:
            yield
        finally:
            forget()


def write(
    kernel: str,
    layer: tuple[str, int, int, int, int, int],
    gate_up: LaunchConfig | Sm90Config,
    down: LaunchConfig | Sm90Config,
    gpu: str = H200,
    arch: str = "sm_90",
    **more: Any,
) -> Path:
    """A row of a layer (format, E, k, H, I, T); the table's path."""
    names = ("format", "experts", "top_k", "hidden", "intermediate", "tokens")
    row: Mapping[str, Any] = {
        **dict(zip(names, layer, strict=True)),
        "gate_up": asdict(gate_up),
        "down": asdict(down),
        "us": {"layer": 12.5, "floor": 4.0},
        **more,
    }
    path = user_table(kernel, gpu)
    header = {"kernel": kernel, "gpu": gpu, "arch": arch, "dtype": "bfloat16", "torch": "2.11.0", "triton": "3.6.0"}
    write_row(path, header, row)
    return path
