"""Exports whose kernels are not compiled, and their C launcher over a driver that only writes down what it is asked."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fanfold.export.c_source import header, source
from fanfold.export.compile import Compiled
from fanfold.export.description import Function, Kernel
from fanfold.export.formulas import evaluate
from fanfold.export.machine_code import Operands, Usage
from fanfold.export.paths import HEADER, SOURCE, cubin_path
from fanfold.export.plan import OPS, plan
from fanfold.export.source import source_of
from fanfold.export.words import number

NEEDS_GCC = pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("g++")), reason="gcc and g++ are not here")
STRICT = ("-pedantic", "-Wall", "-Wextra", "-Werror")
CUBIN = b"\x7fELF%s\0"
"""Machine code of tests: its kernel's id."""
FAKE_DRIVER = Path(__file__).with_name("fake_cuda.c")
FORMATS = ("gptq4-g128", "packed4-g128-asym", "nvfp4", "mxfp4", "bf16")


@cache
def described(archs: tuple[int, ...] = (80, 90), dtypes: tuple[str, ...] = ("bf16",)) -> tuple[Compiled, ...]:
    """Every op, with some formats of weights; nothing is compiled."""
    return tuple(as_compiled(kernel) for kernel in plan(archs, OPS, dtypes, FORMATS))


def as_compiled(kernel: Kernel) -> Compiled:
    found = source_of(kernel.kernel, kernel.example, kernel.arch)
    shared = 60000 if kernel.function.name.endswith("_down") else 0
    usage, operands = Usage(32, 0), Operands(0, ())
    parameters, constants, warps = found.parameters, found.constants, kernel.example["num_warps"]
    cubin = CUBIN % kernel.id.encode()
    return Compiled(kernel, parameters, constants, "symbol", "", cubin, warps, shared, usage, operands)


def run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def write_export(folder: Path, compiled: Sequence[Compiled]) -> None:
    """What a host needs."""
    for made in compiled:
        path = folder / cubin_path(made.kernel)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(made.cubin)
    (folder / HEADER).write_text(header(compiled))
    (folder / SOURCE).write_text(source(compiled))


def build_driver(folder: Path) -> Path:
    """The driver, under the name that hosts load."""
    run("gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", FAKE_DRIVER, "-o", folder / "libcuda.so.1")
    return folder / "libcuda.so.1"


def build(folder: Path) -> Path:
    """The launcher as a library."""
    run("gcc", "-std=c99", *STRICT, "-fPIC", "-shared", folder / SOURCE, "-o", folder / "libfanfold.so", "-ldl")
    return folder / "libfanfold.so"


class Error(ctypes.Structure):
    _fields_ = (("status", ctypes.c_int), ("message", ctypes.c_char * 480))

    @property
    def text(self) -> str:
        return self.message.decode()


class Buffer(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64))


class Parameter(ctypes.Structure):
    _fields_ = (
        *(("kind", ctypes.c_char), ("index", ctypes.c_uint16), ("multiple", ctypes.c_uint16)),
        ("name", ctypes.c_char_p),
    )


class KernelRow(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_char_p) for name in ("id", "function", "symbol", "file")),
        *((name, ctypes.c_int32) for name in ("arch", "warps", "shared_bytes")),
        ("cubin_bytes", ctypes.c_int64),
        *(("choices", ctypes.c_void_p), ("choice_count", ctypes.c_int32)),
        *(("parameters", ctypes.POINTER(Parameter)), ("parameter_count", ctypes.c_int32)),
        *(("needs", ctypes.c_void_p), ("need_count", ctypes.c_int32)),
        ("grid", ctypes.c_uint16 * 3),
    )


class Launch(ctypes.Structure):
    """What the fake driver wrote down."""

    _fields_ = (
        *(("count", ctypes.c_int), ("attribute", ctypes.c_int), ("grid", ctypes.c_uint * 3)),
        *(("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", ctypes.c_void_p)),
        ("parameters", ctypes.c_uint64 * 64),
    )


@dataclass
class Host:
    """A process that has loaded the launcher and opened a folder."""

    library: ctypes.CDLL
    driver: ctypes.CDLL
    context: ctypes.c_void_p

    def call(self, function: Function, **arguments: Any) -> tuple[int, Error]:
        """Status and error of a typed function; what is not said is 0."""
        error = Error()
        structure = arguments_of(function)(**arguments)
        name = f"fanfold_{function.name}"
        status = self.library[name](self.context, ctypes.byref(structure), None, ctypes.byref(error))
        return status, error

    @property
    def launched(self) -> Launch:
        return Launch.in_dll(self.driver, "last_launch")


@cache
def arguments_of(function: Function) -> type[ctypes.Structure]:
    """The struct of a typed function."""
    fields: list[tuple[str, Any]] = [(size.name, ctypes.c_int64) for size in function.sizes]
    fields += [(choice.name, ctypes.c_int32) for choice in function.choices if choice.formula is None]
    fields += [(name, ctypes.c_float) for name, _ in function.numbers]
    fields += [(buffer.name, Buffer) for buffer in function.buffers]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def sizes_for(kernel: Kernel, given: Mapping[str, int]) -> dict[str, int]:
    """Named sizes of a call that this kernel is for."""
    found = {**given, "arch": int(kernel.arch.removeprefix("sm_")), "element_bytes": 2}
    found |= {f"has_{buffer.name}": int(buffer.name in kernel.needs) for buffer in kernel.function.buffers}
    for choice in kernel.function.choices:
        if choice.formula is None:
            found[choice.name] = number(choice.name, kernel.choices[choice.name])
    return kernel.function.sizes_of(found)


def is_for(kernel: Kernel, sizes: Mapping[str, int]) -> bool:
    """Whether a call of these sizes takes the kernel."""
    return all(sizes[name] == number(name, value) for name, value in kernel.choices.items())


def evaluated(made: Compiled, sizes: Mapping[str, int]) -> dict[str, int]:
    """Value of every argument that is a whole number."""
    found = {p.name: made.kernel.values[p.name].formula for p in made.parameters if p.type in ("i32", "i64")}
    return {name: evaluate(formula, sizes) for name, formula in found.items()}
