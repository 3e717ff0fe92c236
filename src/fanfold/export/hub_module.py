"""Launches exported kernels on torch tensors, without fanfold and without Triton: the module of a hub export.

It is copied as it is into `build/torch-cuda/__init__.py`, beside manifest.json and the kernels, so it knows nothing but
the standard library and torch. A function of the manifest is called by its name:

    kernels.call("activate", rows=64, outputs=768, dtype="bf16", activation="silu", y1=y1, h=h)

Sizes, choices and numbers are given by name, buffers as tensors; a buffer that is left out is not there.
"""

from __future__ import annotations

import ctypes
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i32": 4, "u64": 8, "u8": 1}
SHARED_WITHOUT_OPTIN = 49152
_MOST_DYNAMIC_SHARED = 8  # a function's attribute in the driver's API


class KernelError(ValueError):
    """A call that can't be launched: says what was found and what was expected."""


def functions() -> list[str]:
    """The names that `call` takes."""
    return list(_functions())


def describe(name: str) -> dict[str, Any]:
    """What the manifest says of a function: sizes, choices, numbers and buffers."""
    return _function(name)


def call(name: str, **arguments: Any) -> None:
    """Launches one function on the current stream of the tensors' device.

    Args:
        name: of the manifest.
        arguments: sizes (int), choices (str or int), numbers (float) and buffers (contiguous tensors), by name.

    Raises:
        KernelError: nothing is launched: an argument is missing, too small or not aligned, or no kernel is for these
            choices or this GPU.
    """
    function = _function(name)
    tensors = {b["name"]: arguments[b["name"]] for b in function["buffers"] if arguments.get(b["name"]) is not None}
    unknown = set(arguments) - {part["name"] for key in _PARTS for part in function[key]}
    if unknown or not tensors:
        raise KernelError(f"{name}: found {sorted(unknown) or 'no tensors'}, expected arguments of its description")
    device = next(iter(tensors.values())).device
    for buffer, tensor in tensors.items():
        if tensor.device.type != "cuda" or tensor.device != device or not tensor.is_contiguous():
            found = f"{tensor.device}, strides {list(tensor.stride())}"
            raise KernelError(f"{name}: {buffer}: found {found}, expected a contiguous tensor on one GPU")
    major, minor = torch.cuda.get_device_capability(device)
    launch = plan(name, f"sm_{major}{minor}", arguments, {key: _extent(tensor) for key, tensor in tensors.items()})
    if 0 not in launch["grid"]:
        with torch.cuda.device(device):
            _launch(launch, torch.cuda.current_stream(device).cuda_stream)


_PARTS = ("sizes", "choices", "numbers", "buffers")


def plan(name: str, arch: str, arguments: dict[str, Any], extents: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """What `call` would launch: `kernel`, `grid`, and `arguments` in order.

    Args:
        name: of the manifest.
        arch: e.g. "sm_90".
        arguments: as for `call`; tensors are not looked at.
        extents: address and bytes of each buffer that is there.

    Raises:
        KernelError: as for `call`.
    """
    function = _function(name)
    sizes = _sizes(function, arch, arguments, extents)
    kernel = _choose(function, arch, arguments, sizes)
    for check in function["checks"]:
        found, most = _number(check["formula"], sizes), _number(check["at_most"], sizes)
        if found > most:
            raise KernelError(f"{name}: {check['what']}: found {found}, expected at most {most}")
    for buffer in kernel["buffers"]:
        wanted = ELEMENT_BYTES[buffer["dtype"]]
        for axis in buffer["shape"]:
            wanted *= _number(axis, sizes)
        address, found = extents.get(buffer["name"], (0, 0))
        if found < wanted or address % buffer["alignment"]:
            expected = f"{wanted} bytes at a multiple of {buffer['alignment']}"
            raise KernelError(f"{name}: {buffer['name']}: found {found} bytes at {address}, expected {expected}")
    values: list[Any] = []
    for argument in kernel["arguments"]:
        if "buffer" in argument:
            values.append(ctypes.c_uint64(extents[argument["buffer"]][0]))
        elif "number" in argument:
            values.append(ctypes.c_float(arguments[argument["number"]]))
        elif "scratch_bytes" in argument:
            values.append(ctypes.c_uint64(0))
        else:
            values.append(_value(name, argument, _number(argument["value"], sizes)))
    grid = [_number(formula, sizes) for formula in kernel["grid"]]
    return {"kernel": kernel, "grid": grid, "arguments": values}


def _value(name: str, argument: dict[str, Any], value: int) -> Any:
    """A number as the kernel takes it."""
    if value % argument["multiple_of"] or not -(2**31) <= value < 2**31:
        expected = f"a multiple of {argument['multiple_of']} in 32 bits"
        raise KernelError(f"{name}: {argument['value']}: found {value}, expected {expected}")
    return {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}[argument["type"]](value)


def _sizes(
    function: dict[str, Any], arch: str, arguments: dict[str, Any], extents: dict[str, tuple[int, int]]
) -> dict[str, int]:
    """All named sizes, and choices that are numbers."""
    found: dict[str, int] = {"arch": int(arch[3:]), "element_bytes": ELEMENT_BYTES.get(arguments.get("dtype", ""), 0)}
    for size in function["sizes"]:
        value = arguments.get(size["name"], 0)
        if not isinstance(value, int) or not size["least"] <= value < 2**31:
            expected = f"{size['least']} to {2**31 - 1}"
            raise KernelError(f"{function['name']}: {size['name']}: found {value!r}, expected {expected}")
        found[size["name"]] = value
    for choice in function["choices"]:
        if "formula" not in choice and choice["name"] not in arguments:
            raise KernelError(f"{function['name']}: {choice['name']}: found nothing, expected {choice['meaning']}")
        if "formula" not in choice and "words" not in choice:
            found[choice["name"]] = arguments[choice["name"]]
    found.update({f"has_{b['name']}": int(b["name"] in extents) for b in function["buffers"]})
    left = {part["name"]: part["formula"] for part in (*function["derived"], *function["choices"]) if "formula" in part}
    while left:
        for size, formula in list(left.items()):
            if not left.keys() & set(_compiled(formula).co_names) - {size}:
                found[size] = _number(left.pop(size), found)
    return found


def _choose(function: dict[str, Any], arch: str, arguments: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """The kernel with the choices of a call."""
    kernels = [k for k in _manifest()["kernels"] if k["function"] == function["name"] and k["arch"] == arch]
    if not kernels:
        archs = sorted({kernel["arch"] for kernel in _manifest()["kernels"]})
        raise KernelError(f"{function['name']}: found {arch}, exported for {', '.join(archs)}")
    for choice in function["choices"]:
        name = choice["name"]
        wanted = arguments[name] if "words" in choice else sizes[name]
        left = [kernel for kernel in kernels if kernel["choices"][name] == wanted]
        if not left:
            offered = ", ".join(dict.fromkeys(str(kernel["choices"][name]) for kernel in kernels))
            raise KernelError(f"{function['name']}: {name}: found {wanted}, exported: {offered}")
        kernels = left
    return kernels[0]


@cache
def _manifest() -> dict[str, Any]:
    return json.loads((FOLDER / "manifest.json").read_text(encoding="utf-8"))


@cache
def _functions() -> dict[str, dict[str, Any]]:
    return {function["name"]: function for function in _manifest()["functions"]}


def _function(name: str) -> dict[str, Any]:
    if name not in _functions():
        raise KernelError(f"function: found {name}, expected one of {', '.join(_functions())}")
    return _functions()[name]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


_CALLS: dict[str, Any] = {
    "__builtins__": {},
    "ceil_div": _ceil_div,
    "power_of_two": _power_of_two,
    "min": min,
    "max": max,
}


@cache
def _compiled(formula: str) -> Any:
    """A formula of the manifest is a Python expression."""
    return compile(formula, "<manifest>", "eval")


def _number(formula: str, sizes: dict[str, int]) -> int:
    return int(eval(_compiled(formula), _CALLS, sizes))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _checked(what: str, status: int) -> None:
    if status != 0:
        raise KernelError(f"{what}: the CUDA driver returned {status}")


@cache
def _loaded(path: str, symbol: str, shared: int, device: int) -> Any:
    """A kernel's function in the current context of a device."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _checked(path, _driver().cuModuleLoadData(ctypes.byref(module), (FOLDER / path).read_bytes()))
    _checked(symbol, _driver().cuModuleGetFunction(ctypes.byref(function), module, symbol.encode()))
    if shared > SHARED_WITHOUT_OPTIN:
        _checked(symbol, _driver().cuFuncSetAttribute(function, _MOST_DYNAMIC_SHARED, shared))
    return function


def _launch(launch: dict[str, Any], stream: int) -> None:
    kernel, values = launch["kernel"], launch["arguments"]
    path, symbol, shared = kernel["cubin"]["file"], kernel["symbol"], kernel["shared_bytes"]
    function = _loaded(path, symbol, shared, torch.cuda.current_device())
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    status = _driver().cuLaunchKernel(
        function, *launch["grid"], *kernel["block"], shared, ctypes.c_void_p(stream), pointers, None
    )
    _checked(kernel["id"], status)
