"""The entries of adapter_model.safetensors: which tensors it holds, of which kinds, and where they lie."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch

from fanfold.errors import CorruptFileError, TensorError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PREFIX = 8
"""Bytes of the header's length."""
ALIGN = 16
"""Bytes, in buffers; in a file tensors may lie anywhere."""
Stamp = tuple[int, int, int]
"""What tells that a file has changed: its number, size and the time of the last change."""


class Entry(NamedTuple):  # adapters have thousands
    """A tensor of the file: where its data begins there, and in the file's places."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    place: int
    nbytes: int


def entries_of(path: Path, file: FileIO) -> list[Entry]:
    """The entries of an open file by place; the header is at its start.

    Raises:
        CorruptFileError: it is no safetensors file, is cut short, or changed meanwhile.
        TensorError: a tensor is not fp32, fp16 or bf16, or is empty.
    """
    stamp = stamp_of(file)
    try:
        with safetensors.safe_open(str(path), "np"):
            pass  # the library checks the header: its form, and that the tensors fill the file
        same = _stamp(path.stat()) == stamp
    except (OSError, safetensors.SafetensorError) as error:
        raise corrupt(path, str(error)) from error
    if not same:
        raise changed(path)
    length = int.from_bytes(file.read(PREFIX), "little")
    text = file.read(length)
    if stamp_of(file) != stamp:
        raise changed(path)
    header: dict[str, Any] = json.loads(text)
    header.pop("__metadata__", None)
    entries: list[Entry] = []
    place = 0
    for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = fields["data_offsets"]
        _check_kind(path, name, fields)
        shape = tuple(fields["shape"])
        entry = Entry(name, DTYPES[fields["dtype"]], shape, PREFIX + length + begin, place, end - begin)
        entries.append(entry)
        place += padded(entry.nbytes)
    return entries


def _check_kind(path: Path, name: str, fields: Mapping[str, Any]) -> None:
    if fields["dtype"] not in DTYPES:
        raise TensorError(
            f"{path}: {name}",
            found=f"dtype {fields['dtype']}",
            expected="F32, F16 or BF16",
            next_step="Save the adapter again in one of these.",
        )
    if 0 in fields["shape"]:
        raise TensorError(
            f"{path}: {name}",
            found=f"shape {fields['shape']}",
            expected="a tensor with values",
            next_step="Save the adapter again with PEFT.",
        )


def stamp_of(file: FileIO) -> Stamp:
    """Of an open file."""
    return _stamp(os.fstat(file.fileno()))


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def padded(nbytes: int) -> int:
    """Bytes with those up to the next tensor of a buffer."""
    return -(-nbytes // ALIGN) * ALIGN


def corrupt(path: Path, found: str) -> CorruptFileError:
    """The error for a file that can't be read as it should be."""
    return CorruptFileError(
        str(path),
        found=found,
        expected="a whole safetensors file",
        next_step="Copy the adapter again, and compare its size with the source.",
    )


def changed(path: Path) -> CorruptFileError:
    """The error for a file that is not the one that was opened."""
    return corrupt(path, "a file that changed while it was read")
