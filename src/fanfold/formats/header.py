"""Header: the table of contents of a safetensors file.

A file is 8 bytes N (little-endian), N bytes of JSON, then the data. The JSON maps each tensor's name to its dtype,
shape and byte range [begin, end) of the data; the ranges fill the data without gaps. All of it is checked here, so that
nothing is ever allocated or read for a size that the file does not have.
(Layout: https://huggingface.co/docs/safetensors, "Format".)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from fanfold.errors import CorruptFileError, UnsupportedError
from fanfold.formats.values import FETCH_AGAIN, LONGEST_NAME, shown, sound_name, too_deep

PREFIX = 8  # bytes of the length
LARGEST = 100_000_000  # bytes of JSON; the writers' own limit
LARGEST_SIZE = 2**48  # of one axis; far above any tensor, and far below where products of sizes overflow
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor.

    Attributes:
        dtype: its dtype.
        shape: its sizes.
        file: the shard that holds it.
        offset: where its data begins, in bytes from the start of that file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return _product(self.shape) * self.dtype.itemsize


def header_length(file: Path, prefix: bytes, size: int) -> int:
    """Bytes of JSON, from the first 8 bytes of a file of that size.

    Raises:
        CorruptFileError: too short to be a safetensors file, or to hold such a header.
    """
    if size < PREFIX or len(prefix) < PREFIX:
        raise _corrupt(file, f"{size} bytes", "a safetensors file, which is longer")
    length = int.from_bytes(prefix, "little")
    if length > min(size - PREFIX, LARGEST):
        raise _corrupt(
            file,
            f"a header of {length} bytes in a file of {size}",
            f"a whole safetensors file, its header at most {LARGEST} bytes",
        )
    return length


def parse_header(file: Path, text: bytes, size: int) -> dict[str, TensorInfo]:
    """The tensors of a file, in the order of their data.

    Args:
        file: the file, for messages and for TensorInfo.
        text: its JSON.
        size: bytes of the whole file.

    Raises:
        CorruptFileError: no JSON of that form, or byte ranges that do not fill the file's data exactly.
        UnsupportedError: a dtype unknown here.
    """
    entries = _entries(file, text)
    start = PREFIX + len(text)
    infos: dict[str, TensorInfo] = {}
    ranges: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        where = f"{file}: {name}"
        shape, offsets = _sizes(where, entry, "shape"), _sizes(where, entry, "data_offsets")
        if len(offsets) != 2:
            raise _corrupt(where, f"data_offsets = {shown(list(offsets))}", "two numbers")
        kind = entry.get("dtype")
        dtype = DTYPES.get(kind) if isinstance(kind, str) else None
        if dtype is None:
            raise UnsupportedError(
                where,
                found=f"dtype {shown(kind)}",
                expected=f"one of {', '.join(DTYPES)}",
                next_step=f"Save the tensor in another dtype. If the file should hold none: {FETCH_AGAIN}",
            )
        infos[name] = TensorInfo(dtype, shape, file, start + offsets[0])
        ranges[name] = (offsets[0], offsets[1])
        if offsets[1] - offsets[0] != infos[name].nbytes:
            raise _corrupt(
                where,
                f"{offsets[1] - offsets[0]} bytes of data",
                f"{infos[name].nbytes} for {kind} {shown(list(shape))}",
            )
    ordered = sorted(infos, key=lambda name: ranges[name])
    end = 0
    for name in ordered:
        if ranges[name][0] != end:
            raise _corrupt(f"{file}: {name}", f"data from byte {ranges[name][0]} on", f"from byte {end} on")
        end = ranges[name][1]
    if start + end != size:
        raise _corrupt(file, f"{size} bytes", f"{start + end}, as its header says")
    return {name: infos[name] for name in ordered}


def _entries(file: Path, text: bytes) -> dict[str, Mapping[str, object]]:
    try:
        header: object = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _corrupt(file, f"a header that is no JSON ({error})", "a safetensors file") from error
    if not isinstance(header, dict) or too_deep(cast(object, header)):
        raise _corrupt(file, f"a header that is {type(cast(object, header)).__name__}", "an object of tensors")
    entries = cast(dict[str, object], header)
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        if not sound_name(name):
            raise _corrupt(
                file, f"a tensor called {shown(name)}", f"printable names, at most {LONGEST_NAME} characters"
            )
        if not isinstance(entry, dict):
            raise _corrupt(f"{file}: {name}", shown(entry), "an object of dtype, shape and data_offsets")
    return cast(dict[str, Mapping[str, object]], entries)


def _sizes(where: str, entry: Mapping[str, object], field: str) -> tuple[int, ...]:
    sizes = entry.get(field)
    if not isinstance(sizes, list) or not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= LARGEST_SIZE
        for size in cast(list[object], sizes)
    ):
        raise _corrupt(where, f"{field} = {shown(cast(object, sizes))}", "a list of sizes")
    return tuple(cast(list[int], sizes))


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _corrupt(where: Path | str, found: str, expected: str) -> CorruptFileError:
    return CorruptFileError(str(where), found=found, expected=expected, next_step=FETCH_AGAIN)
