"""Output: a folder that appears under its name only when everything in it has been written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fanfold.errors import ArgumentError, FanfoldError, UnavailableError

# Files of a checkpoint that hold weights, or tables of them; all others are copied.
WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


def check_free(output: Path) -> None:
    """Refuses a path that something lies at.

    Raises:
        ArgumentError: a file, or a directory that is not empty.
    """
    if output.is_dir() and not any(output.iterdir()):
        return
    if output.exists() or output.is_symlink():
        raise ArgumentError(
            str(output),
            found="a directory with files in it" if output.is_dir() else "a file",
            expected="a path where nothing is, or an empty directory",
            next_step="Pass another directory; nothing is overwritten.",
        )


@contextmanager
def whole_folder(output: Path) -> Generator[Path]:
    """A new folder beside `output`, renamed to it when the block ends well, else removed.

    Raises:
        UnavailableError: the disk is full, or can't be written to.
    """
    output = output.resolve()
    folder = output.with_name(f".{output.name}.{os.getpid()}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
        folder.rename(output)  # replaces an empty directory, and nothing else
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, FanfoldError):
            raise UnavailableError(
                str(output),
                found=str(error),
                expected="a directory that can be written",
                next_step="Free some space, or pass a directory elsewhere. Nothing was kept.",
            ) from error
        raise


def copy_side_files(source: Path, folder: Path) -> None:
    """Everything in `source` but weights, config.json, folders and hidden files: tokenizer, generation config, code."""
    for file in sorted(source.iterdir()):
        other = file.name == "config.json" or file.name.startswith(".") or file.name.endswith(WEIGHTS)
        if file.is_file() and not other:
            shutil.copyfile(file, folder / file.name)
