"""The tensors of an adapter directory, read whole and checked one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from torch import Tensor

from fanfold.errors import CorruptFileError, MissingFileError, TensorError, UnsupportedError

FILE_NAME = "adapter_model.safetensors"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file's path and its tensors by name.

    The file is copied to memory, not mapped: hot-swapping callers overwrite adapter files in place.

    Raises:
        MissingFileError: there is no adapter_model.safetensors.
        UnsupportedError: there is a pickled adapter_model.bin instead.
        CorruptFileError: the file is not safetensors, or is cut short.
        TensorError: a tensor is not fp32, fp16 or bf16, is empty, or holds NaN or inf.
    """
    file = folder / FILE_NAME
    try:
        entries = cast("list[tuple[str, dict[str, Any]]]", safetensors.deserialize(file.read_bytes()))
    except FileNotFoundError as error:
        raise _missing(folder) from error
    except (OSError, safetensors.SafetensorError) as error:
        raise CorruptFileError(
            str(file),
            found=str(error),
            expected="a whole safetensors file",
            next_step="Copy the adapter again, and compare its size with the source.",
        ) from error
    by_name = dict(entries)  # in no fixed order
    return file, {name: _tensor(file, name, by_name[name]) for name in sorted(by_name)}


def _tensor(file: Path, name: str, entry: dict[str, Any]) -> Tensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise TensorError(
            f"{file}: {name}",
            found=f"dtype {entry['dtype']}",
            expected="F32, F16 or BF16",
            next_step="Save the adapter again in one of these.",
        )
    if 0 in entry["shape"]:
        raise TensorError(
            f"{file}: {name}",
            found=f"shape {entry['shape']}",
            expected="a tensor with values",
            next_step="Save the adapter again with PEFT.",
        )
    tensor = torch.frombuffer(entry["data"], dtype=dtype)
    finite = torch.isfinite(tensor)
    if not finite.all():
        bad = tensor.numel() - int(finite.sum())
        raise TensorError(
            f"{file}: {name}",
            found=f"{bad} of {tensor.numel()} values NaN or inf",
            expected="finite weights",
            next_step="Training diverged or the file is damaged; use an earlier checkpoint of it.",
        )
    return tensor.reshape(entry["shape"])


def _missing(folder: Path) -> MissingFileError | UnsupportedError:
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
