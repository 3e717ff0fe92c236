"""Files: the only place of the formats that touches a disk.

A checkpoint directory is a set of safetensors shards and some JSON files. Headers are read at once, tensors when asked
for, by plain reads into memory of their own: nothing is mapped, so that resident memory is what was asked for, and a
file that is cut short meanwhile is an error instead of a crash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fanfold.errors import ConfigError, CorruptFileError, MissingFileError, TensorError
from fanfold.formats.header import PREFIX, TensorInfo, header_length, parse_header
from fanfold.formats.values import FETCH_AGAIN, shown, sound_name, too_deep

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Stamp = tuple[int, int, int]  # inode, size and time of change: another file under the same name has another stamp


class CheckpointFiles:
    """Tensors of a checkpoint directory by name.

    Args:
        path: the directory. Shards are those of model.safetensors.index.json, else model.safetensors.

    Attributes:
        infos: tensor name -> TensorInfo, over all shards.

    Raises:
        MissingFileError: no such directory, no safetensors in it, or a shard that the index names is absent.
        CorruptFileError: a shard or the index can't be read.
        ConfigError: model.safetensors lies beside an index that does not name it.
        TensorError: the index names a tensor that its shard does not hold, or two shards hold one it does not name.
        UnsupportedError: a tensor has a dtype unknown here.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stamps: dict[Path, Stamp] = {}
        self.infos: Mapping[str, TensorInfo] = self._headers()

    def read(self, name: str, row: int | None = None) -> Tensor:
        """One tensor, in memory of its own.

        Args:
            name: its name.
            row: read only this index of its first axis.

        Returns:
            The tensor; with `row`, without its first axis.

        Raises:
            TensorError: no such tensor.
            CorruptFileError: its shard was replaced or cut since the headers were read.
        """
        info = self.infos.get(name)
        if info is None:
            raise TensorError(
                f"{self.path}: {name}",
                found="no such tensor",
                expected="a tensor of one of the shards",
                next_step="`fanfold inspect` lists what the checkpoint holds.",
            )
        shape, offset, count = info.shape, info.offset, info.nbytes
        if row is not None:
            count //= shape[0]
            shape, offset = shape[1:], offset + row * count
        data = torch.empty(count, dtype=torch.uint8)
        try:
            with info.file.open("rb", buffering=0) as file:
                changed = _stamp(file.fileno()) != self._stamps[info.file]
                file.seek(offset)
                if changed or not _fill(file, data):
                    raise CorruptFileError(
                        f"{info.file}: {name}",
                        found="a file that changed since its header was read",
                        expected="the same file",
                        next_step="Load the checkpoint again once the file is complete.",
                    )
        except OSError as error:
            raise _unreadable(info.file, error) from error
        return data.view(info.dtype).reshape(shape)

    def _headers(self) -> dict[str, TensorInfo]:
        present = self._list()
        if INDEX not in present:
            self._require_single(present)
            return self._header(SINGLE)
        shard_of = self._weight_map()
        shards = sorted(set(shard_of.values()))
        missing = [shard for shard in shards if shard not in present]
        if missing:
            raise MissingFileError(
                str(self.path),
                found=f"no {', '.join(missing[:8])}" + (f" and {len(missing) - 8} more" if len(missing) > 8 else ""),
                expected=f"all {len(shards)} shards that {INDEX} names",
                next_step="Fetch the missing shards.",
            )
        if SINGLE in present and SINGLE not in shards:
            raise ConfigError(
                f"{self.path / INDEX}",
                found=f"shards {', '.join(shards[:4])}, and {SINGLE} beside them",
                expected="one set of weights",
                next_step=f"Remove {SINGLE}, or the index with its shards: whichever is the older.",
            )
        infos: dict[str, TensorInfo] = {}
        for shard in shards:
            for name, info in self._header(shard).items():
                if shard_of.get(name, shard) != shard:
                    continue  # a copy; the index says which one counts
                if name in infos:
                    raise TensorError(
                        f"{info.file}: {name}",
                        found=f"the tensor also in {infos[name].file.name}, and in neither by {INDEX}",
                        expected="one tensor of that name",
                        next_step="Fetch the checkpoint again: its index is incomplete.",
                    )
                infos[name] = info
        for name, shard in shard_of.items():
            if name not in infos:
                raise TensorError(
                    f"{self.path / shard}: {name}",
                    found="no such tensor",
                    expected=f"the tensor, as {INDEX} says",
                    next_step="The index and the shards are of different checkpoints: fetch both again.",
                )
        return infos

    def _list(self) -> set[str]:
        """Names of the files there."""
        try:
            return {entry.name for entry in self.path.iterdir() if entry.is_file()}
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            raise MissingFileError(
                str(self.path),
                found="a file" if isinstance(error, NotADirectoryError) else f"no directory ({error})",
                expected="a checkpoint directory",
                next_step="Pass the directory that holds config.json and the safetensors files.",
            ) from error

    def _weight_map(self) -> dict[str, str]:
        """The index: tensor name -> file name.

        Raises:
            CorruptFileError: it is no such object, or a name is not that of a file in this directory.
        """
        weight_map = read_json(self.path / INDEX).get("weight_map")
        found = None
        if not isinstance(weight_map, dict) or not weight_map:
            found = shown(cast(object, weight_map))
        else:
            for name, shard in cast("dict[str, object]", weight_map).items():
                file_name = shard if isinstance(shard, str) and "/" not in shard else ".."
                if file_name in (".", "..") or not sound_name(file_name) or not sound_name(name):
                    found = f"{shown(name)} in {shown(shard)}"
                    break
        if found is not None:
            raise CorruptFileError(
                f"{self.path / INDEX}: weight_map",
                found=found,
                expected="tensor names and names of files in this directory",
                next_step=FETCH_AGAIN,
            )
        return cast(dict[str, str], weight_map)

    def _require_single(self, present: set[str]) -> None:
        if SINGLE in present:
            return
        pickles = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth")))
        others = sorted(name for name in present if name.endswith(".safetensors"))
        found = f"no {SINGLE} and no {INDEX}"
        next_step = "Pass the directory of a whole checkpoint."
        if others:
            found = f"{', '.join(others[:4])}, but {found}"
            next_step = f"Fetch {INDEX}; a single file must be called {SINGLE}."
        elif pickles:
            found = f"only pickled weights ({pickles[0]})"
            next_step = "Convert the weights with safetensors; fanfold opens no pickles."
        raise MissingFileError(
            str(self.path), found=found, expected=f"{SINGLE}, or shards with {INDEX}", next_step=next_step
        )

    def _header(self, shard: str) -> dict[str, TensorInfo]:
        """The tensors of one shard.

        Raises:
            CorruptFileError: it is no safetensors file, or is truncated.
            UnsupportedError: a dtype unknown here.
        """
        path = self.path / shard
        try:
            with path.open("rb") as file:
                stamp = _stamp(file.fileno())
                size = stamp[1]
                text = file.read(header_length(path, file.read(PREFIX), size))
        except OSError as error:
            raise _unreadable(path, error) from error
        self._stamps[path] = stamp
        return parse_header(path, text, size)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file whose top is an object.

    Raises:
        MissingFileError: no such file.
        CorruptFileError: not JSON, not an object, or nested deeper than any config.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise MissingFileError(
            str(file),
            found="nothing",
            expected="a JSON file",
            next_step="Pass the directory of a whole checkpoint.",
        ) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            str(file), found=f"no JSON ({error})", expected="a JSON object", next_step=FETCH_AGAIN
        ) from error
    if not isinstance(value, dict) or too_deep(cast(object, value)):
        found = f"a {type(value).__name__}" if not isinstance(value, dict) else "objects nested without end"
        raise CorruptFileError(str(file), found=found, expected="a JSON object", next_step=FETCH_AGAIN)
    return cast(dict[str, Any], value)


def read_json_if_there(file: Path) -> dict[str, Any] | None:
    """`read_json`, or None where there is no such file."""
    return read_json(file) if file.exists() else None


def _stamp(descriptor: int) -> Stamp:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _fill(file: FileIO, data: Tensor) -> bool:
    """Reads until `data` uint8 [count] is full; False where the file ends before."""
    view = data.numpy().data
    while len(view):
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def _unreadable(file: Path, error: OSError) -> CorruptFileError:
    return CorruptFileError(
        str(file),
        found=error.strerror or str(error),
        expected="a readable file",
        next_step="Check the file's permissions and the disk, or fetch the file again.",
    )
