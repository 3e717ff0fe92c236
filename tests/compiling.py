"""Compiles Triton kernels for GPUs that are not here, and reads what the code takes of one and does.

Compiling takes seconds. What it found for a kernel, arguments, arch and compiler is kept in compiled.jsonl under the
name that Triton's own cache would give it, so only what has changed since `make record` is compiled, and one of 256
of the others: it must give what is kept.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import compile_record
from fanfold.export.machine_code import disassembly, register_operands, usage
from fanfold.export.source import compiling_for
from fanfold.spec.arch import SHARED_BYTES

ARCHS = sorted(SHARED_BYTES, key=lambda arch: int(arch.removeprefix("sm_")))
ALL_ARCHS = pytest.mark.parametrize("arch", ARCHS)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes, and of its machine code what the tests look at.

    Attributes:
        case: which kernel, for messages.
        registers: a thread.
        stack: bytes a thread in local memory; more than 0 where registers spill.
        shared: bytes of shared memory a block.
        products: names of the matrix instructions, e.g. "HMMA.16816.F32"; these three are empty unless disassembled.
        register_operands: matrix instructions of Hopper that take their left operand from registers.
        hazards: writes to such an operand in flight.
    """

    case: str = field(compare=False)
    registers: int
    stack: int
    shared: int
    products: tuple[str, ...] = ()
    register_operands: int = 0
    hazards: tuple[str, ...] = ()

    def has_product(self, name: str) -> bool:
        """Whether a matrix instruction's name holds this: "OMMA" is in UTCOMMA, HMMA is not in HGMMA."""
        return any(name in product for product in self.products)


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    arch: str,
    num_warps: int,
    case: str,
    **options: Any,
) -> Resources:
    """Compiles for one arch.

    Args:
        kernel: a function under triton.jit.
        types: of the run-time arguments by name: "*bf16", "i32", "fp32", ...; pointers are taken as 16-byte aligned.
        constants: values of the others.
        arch: e.g. "sm_90".
        num_warps: of a program.
        case: names it among those of this kernel.
        options: further launch options, e.g. enable_fp_fusion.

    Returns:
        What the kernel takes.
    """
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
    return _known_or_compiled(source, target, {"num_warps": num_warps, **options}, case, disassemble=False)


def check_fits(resources: Resources, arch: str) -> None:
    """Fails where the kernel spills or can't be launched on the arch."""
    assert resources.stack == 0, f"spills: {resources}"
    assert resources.shared <= SHARED_BYTES[arch], f"more shared memory than {arch} has: {resources}"


def cache_key(source: Any, target: Any, options: Mapping[str, Any], more: str = "") -> str:
    """Digest of the name that Triton's cache would give the code, and of what else is asked of it."""
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    backend = make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    whole = get_cache_key(source, backend, parsed, get_cache_invalidating_env_vars()) + more
    return hashlib.sha256(whole.encode()).hexdigest()[:24]


def _known_or_compiled(source: Any, target: Any, options: dict[str, Any], case: str, disassemble: bool) -> Resources:
    import triton

    key = cache_key(source, target, options, f"-{disassemble}")
    known = found = compile_record.find(key)
    kernel, arch = f"{source.name} {case}", f"sm_{target.arch}"
    if found is None or key.startswith("00"):
        found = _read(f"{kernel} {arch}", triton.compile(source, target=target, options=options), disassemble)
    assert known in (None, found), f"compiled.jsonl holds {known}, found {found}"
    compile_record.add(key, kernel, arch, found)
    return replace(found, case=f"{kernel} {arch}")


def _read(case: str, compiled: Any, disassemble: bool) -> Resources:
    used = usage(compiled.asm["cubin"])
    taken = (used.registers, used.stack, compiled.metadata.shared)
    if not disassemble:
        return Resources(case, *taken)
    sass = disassembly(compiled.asm["cubin"])
    products = sorted(set(re.findall(r"\b[A-Z]+MMA\b[.\w]*", sass)))
    found = register_operands(sass)
    return Resources(case, *taken, tuple(products), found.count, found.hazards)


def compile_launch(
    kernel: Any, arguments: Mapping[str, Any], arch: str, case: str, disassemble: bool = True
) -> Resources:
    """Compiles what a launch with these arguments would, for a GPU that is not here.

    Args:
        kernel: a function under triton.jit or gluon.jit.
        arguments: arguments and launch options by name; tensors may lie on the CPU.
        arch: e.g. "sm_90".
        case: names it among those of this kernel.
        disassemble: False saves a second or so.

    Returns:
        What the kernel takes.
    """

    def compile(source: Any, target: Any, options: dict[str, Any]) -> Resources:
        return _known_or_compiled(source, target, options, case, disassemble)

    with compiling_for(kernel, arch, compile):
        return kernel.warmup(grid=(1,), **arguments)


def machine_code(kernel: Any, arguments: Mapping[str, Any], arch: str) -> str:
    """What `cuobjdump -sass` prints of the code that a launch would compile."""
    import triton

    with compiling_for(kernel, arch, triton.compile):
        return disassembly(kernel.warmup(grid=(1,), **arguments).asm["cubin"])
