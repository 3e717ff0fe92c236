"""Compiles a Triton kernel for a GPU that is not here, and reads what it takes of one."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fanfold.spec.arch import SHARED_BYTES

ARCHS = sorted(SHARED_BYTES, key=lambda arch: int(arch.removeprefix("sm_")))
ALL_ARCHS = pytest.mark.parametrize("arch", ARCHS)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: a thread.
        stack: bytes a thread in local memory; more than 0 where registers spill.
        shared: bytes of shared memory a block.
    """

    registers: int
    stack: int
    shared: int


def compile_kernel(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], arch: str, num_warps: int, **options: Any
) -> Resources:
    """Compiles for one arch.

    Args:
        kernel: a function under triton.jit.
        types: of the run-time arguments by name: "*bf16", "i32", "fp32", ...; pointers are taken as 16-byte aligned.
        constants: values of the others.
        arch: e.g. "sm_90".
        num_warps: of a program.
        options: further launch options, e.g. enable_fp_fusion.

    Returns:
        What the kernel takes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(kernel.arg_names)
    assert sorted(names) == sorted([*types, *constants]), "every argument once"
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind.startswith("*")},
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps, **options})
    return _read(compiled, disassemble=False)[0]


def check_fits(resources: Resources, arch: str) -> None:
    """Fails where the kernel spills or can't be launched on the arch."""
    assert resources.stack == 0, f"spills: {resources}"
    assert resources.shared <= SHARED_BYTES[arch], f"more shared memory than {arch} has: {resources}"


def _read(compiled: Any, disassemble: bool) -> tuple[Resources, str]:
    """What a compiled kernel takes, and its machine code (or ""), by the cuobjdump that triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, *sass = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True, timeout=60).stdout
            for flag in (("-res-usage", "-sass") if disassemble else ("-res-usage",))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Resources(int(found[1]), int(found[2]), compiled.metadata.shared), "".join(sass)


class _Absent:
    """The driver of a GPU that is not here; enough to compile."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(
    kernel: Any, arguments: Mapping[str, Any], arch: str, disassemble: bool = True
) -> tuple[Resources, str]:
    """Compiles what a launch with these arguments would, for a GPU that is not here.

    Args:
        kernel: a function under triton.jit or gluon.jit.
        arguments: arguments and launch options by name; tensors may lie on the CPU.
        arch: e.g. "sm_90".
        disassemble: False saves a second or so.

    Returns:
        What the kernel takes, and its machine code as `cuobjdump -sass` prints it ("" without `disassemble`).
    """
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Absent(int(arch.removeprefix("sm_"))))
    try:
        compiled = kernel.warmup(grid=(1,), **arguments)
    finally:
        driver._active = before
    return _read(compiled, disassemble)
