"""adapter_model.safetensors: what it holds at once, its values a part at a time.

The file is read, not mapped: hot-swapping callers overwrite adapter files in place, and a mapping would show that, or
end the process.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fanfold.errors import FanfoldError, MissingFileError, TensorError, UnsupportedError
from fanfold.lora.entries import Entry, changed, corrupt, entries_of, padded, stamp_of

FILE_NAME = "adapter_model.safetensors"
_NO_BYTES = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True)
class _Part:
    """Entries of one dtype that lie one behind the other in the file and in a buffer."""

    first: Entry
    begin: int
    nbytes: int


class Fetched(NamedTuple):
    """Bytes of tensors in a host buffer.

    Attributes:
        tensors: of the file, or views of them.
        numbers: of the entry that each is in.
        begins: number of an entry -> its place in the buffer.
        parts: of the buffer.
        host: the buffer, uint8.
    """

    tensors: list[Tensor]
    numbers: list[int]
    begins: Mapping[int, int]
    parts: list[_Part]
    host: Tensor


class AdapterFile:
    """The open file. Its tensors have shapes and dtypes, but no values before they are read.

    Attributes:
        path: the file.
        tensors: name -> tensor on the meta device, by name. Parts and transposes of them can be read too: where the
            values lie is told by the storage offset, as all tensors of one dtype are views of one.
    """

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path = path
        self._file = file
        self._stamp = stamp_of(file)
        self._entries = entries_of(path, file)
        end = self._entries[-1].place + padded(self._entries[-1].nbytes) if self._entries else 0
        places = {
            dtype: torch.empty(end // dtype.itemsize, dtype=dtype, device="meta")
            for dtype in {entry.dtype for entry in self._entries}
        }
        self.tensors: dict[str, Tensor] = {
            entry.name: _view(places[entry.dtype], entry.shape, entry.place)
            for entry in sorted(self._entries, key=lambda entry: entry.name)
        }
        self._starts = [entry.place for entry in self._entries]
        self._buffers = [_NO_BYTES, _NO_BYTES]

    def read_apart(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The values of tensors of this file, or of views of them, on the CPU, in memory of their own.

        Raises:
            FanfoldError: what `fetch` and `values` raise.
        """
        device = torch.device("cpu")
        found = self.values(self.fetch(tensors, device), device)
        self._buffers = [_NO_BYTES, _NO_BYTES]
        return found

    def fetch(self, tensors: Iterable[Tensor], device: torch.device) -> Fetched:
        """Reads what tensors of this file, or views of them, hold, into one of two buffers that are filled in turn.

        May run in another thread beside `values` of the last call: most of its time is the operating system's.

        Args:
            tensors: of the file.
            device: where they will go.

        Raises:
            CorruptFileError: the file ends early.
        """
        wanted = list(tensors)
        numbers = [bisect_right(self._starts, _offset(tensor)) - 1 for tensor in wanted]
        begins: dict[int, int] = {}
        end = 0
        for number in sorted(set(numbers)):
            begins[number] = end
            end += padded(self._entries[number].nbytes)
        parts = self._parts(begins)
        host = self._host(end, device)
        for part in parts:
            self._fill(host[part.begin : part.begin + part.nbytes], part.first.begin)
        return Fetched(wanted, numbers, begins, parts, host)

    def values(self, fetched: Fetched, device: torch.device) -> list[Tensor]:
        """The tensors with their values.

        On a CPU they lie in the buffer, which the call of `fetch` after the next fills anew. To a GPU they go by one
        copy on the current stream.

        Raises:
            TensorError: a tensor holds NaN or inf.
            torch.OutOfMemoryError: the device has no room.
        """
        values = fetched.host.to(device, non_blocking=True)
        self._check_finite(values, fetched)  # waits for the copy: the buffer is free again
        typed = {dtype: values.view(dtype) for dtype in {tensor.dtype for tensor in fetched.tensors}}
        return [
            typed[tensor.dtype].as_strided(
                tensor.shape,
                tensor.stride(),
                (_offset(tensor) - self._starts[number] + fetched.begins[number]) // tensor.itemsize,
            )
            for tensor, number in zip(fetched.tensors, fetched.numbers, strict=True)
        ]

    def check_unchanged(self) -> None:
        """Whether the file is the one that was opened, as far as its size and the time of its last change tell.

        Raises:
            CorruptFileError: it is not.
        """
        if stamp_of(self._file) != self._stamp:
            raise changed(self.path)

    def _parts(self, begins: Mapping[int, int]) -> list[_Part]:
        parts: list[_Part] = []
        for number, begin in begins.items():
            entry = self._entries[number]
            last = parts[-1] if parts else None
            if (
                last is not None
                and last.first.dtype == entry.dtype
                and last.first.begin + last.nbytes == entry.begin
                and last.begin + last.nbytes == begin
            ):
                parts[-1] = _Part(last.first, last.begin, last.nbytes + entry.nbytes)
            else:
                parts.append(_Part(entry, begin, entry.nbytes))
        return parts

    def _host(self, nbytes: int, device: torch.device) -> Tensor:
        """The next buffer: memory that has been written to once is several times faster than new memory."""
        self._buffers.reverse()
        if self._buffers[0].numel() < nbytes:
            if device.type == "cuda":
                with torch.cuda.device(device):  # else a thread's first use of CUDA is of the first GPU
                    self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._buffers[0] = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffers[0][:nbytes]

    def _fill(self, data: Tensor, begin: int) -> None:
        """Reads `data` uint8 [count] from that byte of the file on."""
        view = data.numpy().data
        self._file.seek(begin)
        while len(view):
            try:
                count = self._file.readinto(view)
            except OSError as error:
                raise corrupt(self.path, str(error)) from error
            if not count:
                raise changed(self.path)
            view = view[count:]

    def _check_finite(self, values: Tensor, fetched: Fetched) -> None:
        """NaN and inf show in the smallest or the largest value; only where they do, tensors are looked at singly."""
        extremes = [
            torch.stack(values[part.begin : part.begin + part.nbytes].view(part.first.dtype).aminmax()).float()
            for part in fetched.parts
        ]
        if not extremes or torch.stack(extremes).isfinite().all():
            return
        for number in sorted(fetched.begins, key=lambda number: self._entries[number].name):
            entry, begin = self._entries[number], fetched.begins[number]
            finite = values[begin : begin + entry.nbytes].view(entry.dtype).isfinite()
            if not finite.all():
                bad = finite.numel() - int(finite.sum())
                raise TensorError(
                    f"{self.path}: {entry.name}",
                    found=f"{bad} of {finite.numel()} values NaN or inf",
                    expected="finite weights",
                    next_step="Training diverged or the file is damaged; use an earlier checkpoint of it.",
                )


@contextmanager
def opened(folder: Path) -> Generator[AdapterFile]:
    """The adapter file of a directory, open inside the block.

    Raises:
        MissingFileError: there is no adapter_model.safetensors.
        UnsupportedError: there is a pickled adapter_model.bin instead.
        CorruptFileError: the file is not safetensors, is cut short, or changes while it is read.
        TensorError: a tensor is not fp32, fp16 or bf16, or is empty.
    """
    path = folder / FILE_NAME
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError as error:
        raise _missing(folder) from error
    except OSError as error:
        raise corrupt(path, str(error)) from error
    with file:
        yield AdapterFile(path, file)


def read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file's path and its tensors by name, in memory of their own.

    Raises:
        FanfoldError: what `opened` raises.
        TensorError: a tensor holds NaN or inf.
    """
    with opened(folder) as file:
        values = file.read_apart(file.tensors.values())
        file.check_unchanged()
        return file.path, dict(zip(file.tensors, values, strict=True))


def _offset(tensor: Tensor) -> int:
    """Bytes from the first place of the file."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _view(base: Tensor, shape: tuple[int, ...], place: int) -> Tensor:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return base.as_strided(shape, strides, place // base.itemsize)


def _missing(folder: Path) -> FanfoldError:
    if (folder / "adapter_model.bin").exists():
        return UnsupportedError(
            str(folder / "adapter_model.bin"),
            found="pickled weights, which can run code when they are read",
            expected=FILE_NAME,
            next_step="If you trust it, convert it with safetensors: torch.load, then save_file.",
        )
    return MissingFileError(
        str(folder / FILE_NAME),
        found="no such file",
        expected="the weights that PEFT writes beside adapter_config.json",
        next_step="Pass the directory that save_pretrained of PEFT wrote.",
    )
