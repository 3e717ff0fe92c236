"""What compiling kernels found: compiled.jsonl, a line a kernel and arch, by name.

Read it for the registers (a thread), shared memory (a block) and spills (stack, a thread) of every kernel, in bytes. A
key is the name that Triton's cache would give the code: it covers the kernel's source and all it calls, arguments,
arch, options and the compiler itself. What is not said is none.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiling import Resources

RECORD = Path(__file__).with_name("compiled.jsonl")


@functools.cache
def _known() -> dict[str, Resources]:
    from compiling import Resources

    known: dict[str, Resources] = {}
    for line in RECORD.read_text().splitlines():
        values = json.loads(line)
        key, case = values.pop("key"), f"{values.pop('kernel')} {values.pop('arch')}"
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        known[key] = Resources(case, **values)
    return known


def find(key: str) -> Resources | None:
    """What is kept under a key."""
    return _known().get(key)


def add(key: str, kernel: str, arch: str, resources: Resources) -> None:
    """Adds a line to the next record, for `make record`; each is one write, so several processes may add theirs."""
    if "FANFOLD_RECORD" not in os.environ:
        return
    values = {name: value for name, value in asdict(resources).items() if name != "case"}
    always = {name: values.pop(name) for name in ("registers", "shared", "stack")}
    line = {"kernel": kernel, "arch": arch, **always, **{name: value for name, value in values.items() if value}}
    with Path(os.environ["FANFOLD_RECORD"]).open("a") as file:
        file.write(json.dumps({**line, "key": key}) + "\n")
