"""Compiles and checks every kernel that layers get, and writes sm90_resources.json; minutes, so not a test.

`PYTHONPATH=src:tests python tests/kernels/grouped/sm90/sm90_resources.py`
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

from sm90_compiling import Kernel, compiled, given_kernels, other_kernels, tuned_kernels

from fanfold.kernels.grouped.sm90 import epilogue, product, unpack
from fanfold.spec.arch import SHARED_BYTES

MANIFEST = Path(__file__).with_suffix(".json")
REGISTERS = 65536
"""Of a multiprocessor."""


def kernels() -> dict[str, Kernel]:
    """All, by name."""
    return {kernel.name: kernel for kernel in [*tuned_kernels(), *other_kernels(), *given_kernels()]}


def source() -> str:
    """What names the source of the kernel."""
    digest = hashlib.sha256()
    for module in (epilogue, product, unpack):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


def check(kernel: Kernel) -> list[int]:
    """Registers, shared bytes and spilled bytes a thread; fails where the kernel is not sound."""
    resources = compiled(kernel)
    assert resources.register_operands, "weights are not a register operand: the check has nothing to see"
    assert resources.hazards == (), kernel.name
    assert resources.shared <= SHARED_BYTES["sm_90"]
    assert resources.registers * 32 * 4 * kernel.config.warpgroups <= REGISTERS
    return [resources.registers, resources.shared, resources.stack]


def write() -> None:
    """The manifest of this source."""
    named = kernels()
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(named, pool.map(check, named.values()), strict=True))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in found.items())
    head = f' "triton": {json.dumps(version("triton"))},\n "source": {json.dumps(source())},'
    MANIFEST.write_text(f'{{\n{head}\n "registers, shared bytes, spilled bytes": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    write()
