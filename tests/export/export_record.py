"""What compiling every exported kernel found: exported.jsonl, a line a kernel, with what it takes on each arch.

`make record-exports` compiles those that have changed: a core second each, of some thousands where the product has
changed. A row is [key, registers a thread, bytes of shared memory a program, bytes a thread that spill, writes to an
operand in flight]. As in `compile_record`, a key is made of the name that Triton's cache would give the code.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from fanfold.export.compile import compile_kernel
from fanfold.export.description import DTYPES, Kernel
from fanfold.export.plan import ARCHS, OPS, plan
from fanfold.export.source import source_of

RECORD = Path(__file__).with_name("exported.jsonl")
KEY = 12
"""Letters of a key that are kept."""


class Row(NamedTuple):
    """Of one kernel on one arch."""

    key: str
    registers: int
    shared: int
    spilled: int
    overwritten: int


Rows = dict[str, dict[str, Row]]
"""By name and arch."""
Unit = tuple[str, str, str]
"""Kernels that one process compiles at once: arch, op, dtype."""


def name_of(kernel: Kernel) -> str:
    """Its id without the arch."""
    return kernel.id.removesuffix(f"-{kernel.arch}")


def key_of(kernel: Kernel) -> str:
    """The key of a kernel as its source is now."""
    from triton import knobs

    from compiling import cache_key

    found = source_of(kernel.kernel, kernel.example, kernel.arch)
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # as in an export
        return cache_key(found.source, found.target, found.options)[:KEY]


def compiled(kernel: Kernel, key: str) -> Row:
    """Compiles as an export does.

    Raises:
        UnsupportedError: it does not fit, or may be wrong.
    """
    from triton import knobs

    with knobs.cache.scope(), tempfile.TemporaryDirectory() as empty:
        knobs.cache.dir = empty
        made = compile_kernel(kernel)
    return Row(key, made.usage.registers, made.shared, made.usage.stack, len(made.operands.hazards))


def read() -> Rows:
    """What is kept."""
    found: Rows = {}
    for line in RECORD.read_text().splitlines() if RECORD.exists() else ():
        values = json.loads(line)
        name = values.pop("kernel")
        found[name] = {arch: Row(*row) for arch, row in values.items()}
    return found


def write(rows: Rows) -> None:
    """Keeps rows, in order of names."""
    text = ""
    for name in sorted(rows):
        values = {"kernel": name} | {arch: rows[name][arch] for arch in ARCHS if arch in rows[name]}
        text += json.dumps(values, separators=(",", ":")) + "\n"
    beside = RECORD.with_suffix(".new")
    beside.write_text(text)
    beside.replace(RECORD)  # at once, as other processes read it


def units(*archs: str) -> Iterator[Unit]:
    """All kernels of some archs; ops that know no dtype come once."""
    for dtype, arch, op in product(DTYPES, archs, OPS):
        if dtype == DTYPES[0] or "dtype" in plan([arch], [op])[0].choices:
            yield arch, op, dtype


def kernels_of(unit: Unit) -> list[Kernel]:
    """Those of a unit."""
    arch, op, dtype = unit
    return plan([arch], [op], (dtype,))


def changed(unit: Unit, kept: Rows) -> Iterator[tuple[str, str, Row]]:
    """Name, arch and new row of kernels whose code has changed."""
    for kernel in kernels_of(unit):
        name, key = name_of(kernel), key_of(kernel)
        row = kept.get(name, {}).get(kernel.arch)
        if row is None or row.key != key:
            yield name, kernel.arch, compiled(kernel, key)


def _changed(unit: Unit) -> list[tuple[str, str, Row]]:
    return list(changed(unit, read()))


def record(processes: int, wanted: Iterable[Unit]) -> None:
    """Compiles what has changed, keeps it a unit at a time, and drops kernels that are no more."""
    rows = read()
    names = {name_of(kernel) for unit in units(*ARCHS) for kernel in kernels_of(unit)}
    rows = {name: rows[name] for name in rows.keys() & names}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_changed, unit): unit for unit in wanted}
        for done in as_completed(running):
            found = done.result()
            for name, arch, row in found:
                rows.setdefault(name, {})[arch] = row
            write(rows)
            if found:
                print(" ".join(running[done]), len(found), flush=True)


if __name__ == "__main__":
    record(int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 1, units(*ARCHS))
