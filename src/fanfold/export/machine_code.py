"""What machine code takes of a GPU and does, by the cuobjdump that Triton brings."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fanfold.export.hazards import hazards, operands


@dataclass(frozen=True)
class Usage:
    """Of one kernel.

    Attributes:
        registers: a thread.
        stack: bytes a thread in local memory; more than 0 where registers spill.
    """

    registers: int
    stack: int


@dataclass(frozen=True)
class Operands:
    """Matrix instructions of Hopper that take an operand from registers.

    Attributes:
        count: how many.
        hazards: writes to such an operand while an instruction may still read it.
    """

    count: int
    hazards: tuple[str, ...]


def usage(cubin: bytes) -> Usage:
    """Registers and spills."""
    printed = dump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found, printed
    return Usage(int(found[1]), int(found[2]))


def disassembly(cubin: bytes) -> str:
    """What `cuobjdump -sass` prints."""
    return dump(cubin, "-sass")


def takes_registers(ptx: str) -> bool:
    """Whether a matrix instruction of Hopper takes an operand from registers; else there is nothing to look for."""
    return re.search(r"wgmma\.mma_async[^;]*\},\s*\{", ptx) is not None


def register_operands(sass: str) -> Operands:
    """Operands in registers, and what overwrites them."""
    count = len(operands(sass))
    return Operands(count, tuple(str(hazard) for hazard in hazards(sass)) if count else ())


def dump(cubin: bytes, flag: str) -> str:
    """Output of cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True, timeout=60).stdout
