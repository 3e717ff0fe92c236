"""Compiles one kernel for a GPU that is not here, and refuses what could not be launched or might be wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from fanfold.errors import UnsupportedError
from fanfold.export.description import KERNEL_TYPES, Kernel
from fanfold.export.machine_code import Operands, Usage, disassembly, register_operands, takes_registers, usage
from fanfold.export.source import Parameter, Source, source_of
from fanfold.spec.arch import SHARED_BYTES

SCRATCH = ("global_scratch", "profile_scratch")
"""Pointers that Triton appends to the arguments of every kernel; null, as none of these kernels uses them."""


@dataclass(frozen=True)
class Compiled:
    """A kernel, and what a host must know to launch it.

    Attributes:
        kernel: what was compiled.
        parameters: arguments in order, without the scratch ones.
        constants: of the kernel.
        symbol: its name in the cubin.
        ptx: text.
        cubin: machine code.
        warps: of 32 threads, a program.
        shared: bytes of dynamic shared memory a program.
        usage: registers and spills.
        operands: matrix operands in registers, and what overwrites them.
    """

    kernel: Kernel
    parameters: tuple[Parameter, ...]
    constants: dict[str, Any]
    symbol: str
    ptx: str
    cubin: bytes
    warps: int
    shared: int
    usage: Usage
    operands: Operands


def compile_kernel(kernel: Kernel) -> Compiled:
    """PTX and cubin of a kernel; no GPU is asked.

    Raises:
        UnsupportedError: it takes more of the arch than there is, or an operand of a matrix instruction may be
            overwritten and no test covers it.
    """
    import triton
    from triton import knobs

    compiler: Any = cast(Any, triton).compile
    source = source_of(kernel.kernel, kernel.example, kernel.arch)
    check_described(kernel, source)
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # it holds paths of this machine
        made = compiler(source.source, target=source.target, options=source.options)
    metadata, ptx, cubin = made.metadata, str(made.asm["ptx"]), bytes(made.asm["cubin"])
    found = Compiled(
        kernel=kernel,
        parameters=source.parameters,
        constants=source.constants,
        symbol=metadata.name,
        ptx=ptx,
        cubin=cubin,
        warps=metadata.num_warps,
        shared=metadata.shared,
        usage=usage(cubin),
        operands=register_operands(disassembly(cubin)) if takes_registers(ptx) else Operands(0, ()),
    )
    entry = ptx[ptx.index(".entry") : ptx.index(")", ptx.index(".entry"))]
    taken = len(re.findall(r"\.param ", entry))
    assert taken == len(found.parameters) + len(SCRATCH), f"{kernel.id}: {taken} parameters"
    assert (metadata.num_ctas, metadata.global_scratch_size, metadata.profile_scratch_size) == (1, 0, 0), kernel.id
    check_fits(kernel, found.shared)
    check_operands(kernel, found.operands)
    return found


def check_described(kernel: Kernel, source: Source) -> None:
    """Whether every argument has a value, and every buffer that is needed is an argument of its type."""
    buffers: dict[str, str] = {}
    for parameter in source.parameters:
        assert parameter.name in kernel.values, f"{kernel.id}: {parameter.name} has no value"
        if parameter.type.startswith("*"):
            buffers[kernel.values[parameter.name].formula] = parameter.type
    wanted = {name: KERNEL_TYPES.get(need.type, f"*{need.type}") for name, need in kernel.needs.items()}
    assert buffers == wanted, f"{kernel.id}: takes {buffers}, described as {wanted}"


def check_fits(kernel: Kernel, shared: int) -> None:
    """Whether a program's shared memory is there.

    Raises:
        UnsupportedError: it is not; names an arch where it is.
    """
    if shared <= SHARED_BYTES[kernel.arch]:
        return
    larger = [arch for arch, most in SHARED_BYTES.items() if most >= shared]
    raise UnsupportedError(
        f"{kernel.id}, config {kernel.config}",
        found=f"{shared} bytes of shared memory a program",
        expected=f"at most {SHARED_BYTES[kernel.arch]} on {kernel.arch}"
        + (f"; it fits on {', '.join(larger)}" if larger else ""),
        next_step="Export a config with fewer stages or a smaller tile.",
    )


def check_operands(kernel: Kernel, operands: Operands) -> None:
    """Whether what products in flight read stays as it is.

    Raises:
        UnsupportedError: it may be overwritten, and no test of exact integers covers the kernel.
    """
    if operands.hazards and kernel.hazard_test is None:
        raise UnsupportedError(
            f"{kernel.id}, config {kernel.config}",
            found=f"an operand of a matrix instruction overwritten in flight: {operands.hazards[0]}",
            expected="machine code that waits for the instruction, or a GPU test of exact integers",
            next_step="Report it with the versions of Triton and ptxas; export another config.",
        )
