"""Writes an export: kernels, manifest, schema, and the C launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fanfold.errors import ArgumentError
from fanfold.export.compile import Compiled, compile_kernel
from fanfold.export.files import write
from fanfold.export.hub import write_hub
from fanfold.export.manifest import manifest
from fanfold.export.plan import plan


def export(
    folder: Path,
    archs: Sequence[int | str],
    ops: Sequence[str],
    dtypes: Sequence[str] = ("bf16",),
    formats: Sequence[str] = (),
    configs: Sequence[str] = (),
    progress: Callable[[int, int, str], None] | None = None,
    hub: bool = False,
) -> dict[str, Any]:
    """Compiles kernels and writes them, with all that a host needs to launch them. No GPU is asked.

    Args:
        folder: is made; must hold nothing.
        archs: compute capabilities.
        ops: of `plan.OPS`.
        dtypes: of activations.
        formats: of weights; none: all that an op is exported for.
        configs: names; none: all that the library selects.
        progress: called with kernels done, all kernels, and the name of the next.
        hub: write the tree of a repository of the `kernels` hub (see `hub`).

    Returns:
        `folder`, `kernels` (their number by op), `bytes` of machine code, `spilled` (kernels that spill, with bytes a
        thread) and `made_by` (versions).

    Raises:
        ArgumentError: nothing is called that, or the folder holds files.
        UnsupportedError: a kernel can't be launched.
    """
    kernels = plan(archs, ops, dtypes, formats, configs)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ArgumentError(
            str(folder),
            found="a folder that holds files" if folder.is_dir() else "a file",
            expected="an empty folder, or none",
            next_step="Name another folder, or remove this one.",
        )
    compiled: list[Compiled] = []
    for done, kernel in enumerate(kernels):
        if progress is not None:
            progress(done, len(kernels), kernel.id)
        compiled.append(compile_kernel(kernel))
    made = manifest(compiled)
    (write_hub if hub else write)(folder, compiled, made)
    ops_of = [found.kernel.function.op for found in compiled]
    return {
        "folder": str(folder),
        "kernels": {op: ops_of.count(op) for op in dict.fromkeys(ops_of)},
        "bytes": sum(len(found.cubin) for found in compiled),
        "spilled": {found.kernel.id: found.usage.stack for found in compiled if found.usage.stack},
        "made_by": made["made_by"],
    }
