"""Shards: safetensors files whose headers are written first and whose tensors follow in any order.

So nothing is held that has been written. Layout: see formats/header.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.formats.files import INDEX, SINGLE
from fanfold.formats.header import DTYPES, PREFIX
from fanfold.quantization.target import Slot

LARGEST = 5_000_000_000  # bytes of the tensors of a shard, of more than one
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: its shard, and the first byte."""

    slot: Slot
    file: Path
    offset: int


class Shards:
    """The files of a checkpoint in a folder: headers and sizes are made at once, tensors put in when they come.

    Args:
        folder: where they are made.
        slots: all tensors; they fill the shards in this order.
        largest: bytes of tensors in a shard, if it holds more than one.
    """

    def __init__(self, folder: Path, slots: Iterable[Slot], largest: int = LARGEST) -> None:
        self.folder = folder
        self._places: dict[str, Place] = {}
        self._missing: set[str] = set()
        shards = _dealt(slots, largest)
        for number, shard in enumerate(shards, start=1):
            self._create(SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors", shard)
        self.files = list(dict.fromkeys(place.file for place in self._places.values()))

    def write(self, name: str, tensor: Tensor) -> None:
        """Puts a tensor into its place.

        Raises:
            ArgumentError: no such place, filled already, or a tensor of another dtype or shape.
            OSError: the disk is full, or the like.
        """
        place = self._places.get(name)
        found = f"{tensor.dtype} {list(tensor.shape)}"
        if place is None or name not in self._missing or (tensor.dtype, tuple(tensor.shape)) != _kind(place.slot):
            raise ArgumentError(
                f"{self.folder}: {name}",
                found=found,
                expected=f"one tensor {place.slot.dtype} {list(place.slot.shape)}" if place else "no such tensor",
                next_step="Plan each tensor once, as it will be written.",
            )
        with place.file.open("r+b") as file:
            file.seek(place.offset)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.remove(name)

    def finish(self) -> None:
        """Writes the index, where there are several shards, and has everything on the disk.

        Raises:
            ArgumentError: a tensor was not written.
            OSError: the disk is full, or the like.
        """
        if self._missing:
            raise ArgumentError(
                f"{self.folder}: {min(self._missing)}",
                found=f"{len(self._missing)} tensors that were not written",
                expected="all of them",
                next_step="Write each planned tensor.",
            )
        if len(self.files) > 1:
            total = sum(_nbytes(place.slot) for place in self._places.values())
            weight_map = {name: place.file.name for name, place in self._places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        for path in self.files:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def _create(self, name: str, slots: list[Slot]) -> None:
        # Readers view each tensor in place, so its offset must be a multiple of its item: the widest come first.
        ordered = sorted(slots, key=lambda slot: -slot.dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        end = 0
        for slot in ordered:
            offsets[slot.name] = end
            end += _nbytes(slot)
            header[slot.name] = {
                "dtype": DTYPE_NAMES[slot.dtype],
                "shape": list(slot.shape),
                "data_offsets": [offsets[slot.name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = PREFIX + len(text)
        path = self.folder / name
        with path.open("wb") as file:
            file.write(len(text).to_bytes(PREFIX, "little") + text)
            file.truncate(start + end)
        self._places |= {slot.name: Place(slot, path, start + offsets[slot.name]) for slot in ordered}
        self._missing |= set(offsets)


def _dealt(slots: Iterable[Slot], largest: int) -> list[list[Slot]]:
    """The slots in runs of at most `largest` bytes, or of one slot."""
    shards: list[list[Slot]] = []
    used = 0
    for slot in slots:
        size = _nbytes(slot)
        if not shards or used + size > largest:
            shards.append([])
            used = 0
        shards[-1].append(slot)
        used += size
    return shards


def _kind(slot: Slot) -> tuple[torch.dtype, tuple[int, ...]]:
    return slot.dtype, slot.shape


def _nbytes(slot: Slot) -> int:
    return prod(slot.shape) * slot.dtype.itemsize
