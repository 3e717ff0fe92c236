"""manifest.json: everything a host must know of exported kernels, as one JSON object with a schema.

Arguments of a kernel and fields of an object are only ever appended; whatever else changes raises VERSION.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, cast

import fanfold
from fanfold.errors import CorruptFileError
from fanfold.export.compile import SCRATCH, Compiled
from fanfold.export.description import Function, Kernel
from fanfold.export.formulas import names
from fanfold.export.paths import SCHEMA, cubin_path, ptx_path
from fanfold.export.words import WORDS

FORMAT, VERSION = "fanfold-kernels", 1
TYPES = {"i32": "int32", "i64": "int64", "fp32": "float32"}
"""Triton's names -> those of the manifest; pointers are "pointer"."""


def manifest(compiled: Sequence[Compiled]) -> dict[str, Any]:
    """The manifest of an export; the same for the same kernels, whenever and wherever it is made."""
    functions = {made.kernel.function.name: made.kernel.function for made in compiled}
    return {
        "format": FORMAT,
        "version": VERSION,
        "made_by": toolchain(),
        "functions": [_function(function) for function in functions.values()],
        "kernels": [_kernel(made) for made in compiled],
    }


def toolchain() -> dict[str, str]:
    """Versions of what the machine code depends on."""
    import triton
    from triton import knobs

    return {"fanfold": fanfold.__version__, "triton": triton.__version__, "ptxas": knobs.nvidia.ptxas.version}


def to_json(value: Mapping[str, Any]) -> str:
    """As it is written."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


@cache
def schema_text() -> str:
    """The JSON Schema (2020-12) of manifest.json."""
    return (files("fanfold.export") / SCHEMA).read_text(encoding="utf-8")


def read_manifest(text: str, path: str) -> dict[str, Any]:
    """A manifest of this version.

    Raises:
        CorruptFileError: it is no JSON, or of another format or version.
    """
    try:
        read: object = json.loads(text)
    except ValueError as error:
        raise _corrupt(path, f"no JSON: {error}") from None
    found = cast(dict[str, Any], read) if isinstance(read, dict) else {}
    said = found.get("format"), found.get("version")
    if said != (FORMAT, VERSION):
        raise _corrupt(path, f"format {said[0]}, version {said[1]}")
    return found


def _corrupt(path: str, found: str) -> CorruptFileError:
    return CorruptFileError(
        path,
        found=found,
        expected=f"a manifest of format {FORMAT}, version {VERSION}",
        next_step="Export the kernels again with this version of fanfold.",
    )


def _function(function: Function) -> dict[str, Any]:
    return {
        "name": function.name,
        "op": function.op,
        "meaning": function.meaning,
        "sizes": [{"name": size.name, "meaning": size.meaning, "least": size.least} for size in function.sizes],
        "numbers": [{"name": name, "meaning": meaning} for name, meaning in function.numbers],
        "choices": [
            {"name": choice.name, "meaning": choice.meaning}
            | ({"words": list(WORDS[choice.name])} if choice.name in WORDS else {})
            | ({"formula": choice.formula} if choice.formula else {})
            for choice in function.choices
        ],
        "derived": [{"name": name, "formula": formula} for name, formula in function.derived],
        "checks": [{"what": c.message, "formula": c.formula, "at_most": c.most} for c in function.checks],
        "buffers": [
            {"name": b.name, "meaning": b.meaning, "written": b.written, "optional": b.optional}
            for b in function.buffers
        ],
    }


def _kernel(made: Compiled) -> dict[str, Any]:
    kernel = made.kernel
    arguments = _arguments(made)
    found: dict[str, Any] = {
        "id": kernel.id,
        "function": kernel.function.name,
        "op": kernel.function.op,
        "arch": kernel.arch,
        "choices": dict(kernel.choices),
        "config": kernel.config,
        "rows_per_expert": _rows(kernel),
        "symbol": made.symbol,
        "ptx": _file(ptx_path(kernel), made.ptx.encode()),
        "cubin": _file(cubin_path(kernel), made.cubin),
        "arguments": arguments,
        "grid": list(kernel.grid),
        "block": [32 * made.warps, 1, 1],
        "warps": made.warps,
        "shared_bytes": made.shared,
        "registers": made.usage.registers,
        "spilled_bytes": made.usage.stack,
        "buffers": [
            {"name": name, "dtype": need.type, "shape": list(need.shape), "alignment": 16}
            for name, need in kernel.needs.items()
        ],
        "limits": _limits(arguments),
        "constants": {name: made.constants[name] for name in sorted(made.constants)},
        "register_operands": {
            "count": made.operands.count,
            "overwritten": list(made.operands.hazards),
            "covered_by": kernel.hazard_test,
        },
    }
    return found


def _rows(kernel: Kernel) -> dict[str, int | None] | None:
    return None if kernel.rows is None else {"above": kernel.rows.above, "up_to": kernel.rows.up_to}


def _arguments(made: Compiled) -> list[dict[str, Any]]:
    kernel, function = made.kernel, made.kernel.function
    buffers = {buffer.name: buffer for buffer in function.buffers}
    numbers = dict(function.numbers)
    found: list[dict[str, Any]] = []
    for parameter in made.parameters:
        value = kernel.values[parameter.name]
        if parameter.type.startswith("*"):
            given = {"type": "pointer", "buffer": value.formula, "multiple_of": parameter.multiple}
            meaning = buffers[value.formula].meaning
        elif value.formula in numbers:
            given, meaning = {"type": "float32", "number": value.formula}, numbers[value.formula]
        else:
            given = {"type": TYPES[parameter.type], "value": value.formula, "multiple_of": parameter.multiple}
            meaning = value.meaning
        found.append({"name": parameter.name, **given, "meaning": meaning})
    for name in SCRATCH:
        found.append({"name": name, "type": "pointer", "scratch_bytes": 0, "meaning": "scratch of the compiler: null"})
    return found


def _limits(arguments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What must divide what: of the arguments, those that depend on sizes."""
    found = {
        argument["value"]: {"formula": argument["value"], "multiple_of": argument["multiple_of"]}
        for argument in arguments
        if argument.get("multiple_of", 1) > 1 and "value" in argument and names(argument["value"])
    }
    return list(found.values())


def _file(path: str, content: bytes) -> dict[str, Any]:
    return {"file": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
