"""What a launch would compile, for a GPU that is not here: its source, and the arguments that are left at run time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class Parameter:
    """One argument of a compiled kernel.

    Attributes:
        name: as the kernel names it; a member of a tuple as `w.stride_e`.
        type: Triton's: "*bf16", "i32", "fp32", ...
        multiple: what its value (for a pointer: its address) must be a multiple of; 1: of nothing.
    """

    name: str
    type: str
    multiple: int


@dataclass(frozen=True)
class Source:
    """A kernel and all that its machine code depends on.

    Attributes:
        source: Triton's ASTSource.
        target: Triton's GPUTarget.
        options: of the launch.
        parameters: arguments at run time, in order.
        constants: values of the kernel's own constants (names in capitals) that are numbers, words or nothing.
    """

    source: Any
    target: Any
    options: dict[str, Any]
    parameters: tuple[Parameter, ...]
    constants: dict[str, Any]


class _Absent:
    """The driver of a GPU that is not here; enough to compile."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.arch = arch
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling_for(kernel: Any, arch: str, compile: Any) -> Generator[None]:
    """Has launches of the kernel go to `compile(source, target, options)` instead of a GPU."""
    from triton.runtime import driver

    slot = cast(Any, driver)
    before: Any = slot._active
    compiler = cast(dict[str, Any], vars(kernel)).get("compile")
    driver.set_active(cast(Any, _Absent(int(arch.removeprefix("sm_")))))
    made: dict[str, Any] = kernel.device_caches[slot.active.get_current_device()][0]  # also sets the kernel's compiler
    try:
        kernel.compile = compile
        yield
    finally:
        made.clear()
        slot._active = before
        if compiler is None:
            del kernel.compile
        else:
            kernel.compile = compiler  # of launches on a GPU that is here


def source_of(kernel: Any, arguments: Mapping[str, Any], arch: str) -> Source:
    """What a launch with these arguments would compile.

    Args:
        kernel: a function under triton.jit or gluon.jit.
        arguments: arguments and launch options by name; tensors may lie on any device.
        arch: e.g. "sm_90".

    Returns:
        The source, with names for all of the arguments that the compiled kernel takes.
    """
    found: list[Source] = []

    def keep(source: Any, target: Any, options: dict[str, Any]) -> None:
        parameters = tuple(_parameters(kernel.arg_names, arguments, source))
        constants = {
            name: value for name, value in arguments.items() if name.isupper() and isinstance(value, int | str | None)
        }
        found.append(Source(source, target, options, parameters, constants))

    with compiling_for(kernel, arch, keep):
        kernel.warmup(grid=(1,), **arguments)
    return found[0]


def _parameters(names: list[str], arguments: Mapping[str, Any], source: Any) -> Iterator[Parameter]:
    """Arguments in order, members of tuples one by one; those that are compiled in are left out."""
    for i, name in enumerate(names):
        kind = source.signature[name]
        if isinstance(kind, str):
            members: list[tuple[str, tuple[int, ...], str]] = [(name, (i,), kind)]
        else:
            fields: tuple[str, ...] = arguments[name]._fields
            inner = cast(tuple[str, ...], kind)
            members = [(f"{name}.{fields[j]}", (i, j), inner[j]) for j in range(len(inner))]
        for full, path, kind in members:
            if kind != "constexpr":
                divisible = ["tt.divisibility", 16] in source.attrs.get(path, [])
                yield Parameter(full, kind, 16 if divisible else 1)
