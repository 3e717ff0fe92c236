"""What compiling found before, by the name that Triton's cache would give the code: compiled.jsonl, a line a kernel.

The name covers the kernel's source and all it calls, arguments, arch, options and the compiler itself.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import astuple
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
        _, key, values = json.loads(line)
        known[key] = Resources(*(tuple(value) if isinstance(value, list) else value for value in values))
    return known


def find(key: str) -> Resources | None:
    """What is kept under a key."""
    return _known().get(key)


def add(key: str, name: str, resources: Resources) -> None:
    """Adds a line to the next record, for `make record`; each is one write, so several processes may add theirs."""
    if "FANFOLD_RECORD" in os.environ:
        with Path(os.environ["FANFOLD_RECORD"]).open("a") as file:
            file.write(json.dumps([name, key, astuple(resources)]) + "\n")
