"""Files: the only place of the formats that touches a disk.

A checkpoint directory is a set of safetensors shards and some JSON files. Headers are read at once, tensors when asked
for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fanfold.errors import CorruptFileError, MissingFileError, TensorError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
FETCH_AGAIN = "Fetch the file again, and compare its size and checksum with the source."


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of a tensor: dtype, shape, bytes, and the shard that holds it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class CheckpointFiles:
    """Tensors of a checkpoint directory by name.

    Args:
        path: the directory. Shards are those of model.safetensors.index.json, else model.safetensors.

    Attributes:
        infos: tensor name -> TensorInfo, over all shards.

    Raises:
        MissingFileError: no such directory, no safetensors in it, or a shard that the index names is absent.
        CorruptFileError: a shard or the index can't be read.
        TensorError: the index names a tensor that its shard does not hold.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.infos: Mapping[str, TensorInfo] = self._headers()
        self._open: dict[Path, Any] = {}

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own.

        Raises:
            TensorError: no such tensor.
            CorruptFileError: the shard ends before its data does, or changed since it was opened.
        """
        info = self.infos.get(name)
        if info is None:
            raise TensorError(
                f"{self.path}: {name}",
                found="no such tensor",
                expected="a tensor of one of the shards",
                next_step="`fanfold inspect` lists what the checkpoint holds.",
            )
        try:
            shard = self._open.get(info.file)
            if shard is None:
                self._open.clear()  # pages of a mapped shard stay in memory until it is closed: one at a time
                shard = self._open[info.file] = cast("Any", safe_open)(str(info.file), framework="pt")
            # The tensor safetensors returns may be a view of the mapped file; a copy outlives changes of the file.
            return cast(Tensor, shard.get_tensor(name)).clone()
        except (SafetensorError, OSError) as error:
            raise CorruptFileError(
                f"{info.file}: {name}",
                found=str(error),
                expected="readable tensor data",
                next_step=FETCH_AGAIN,
            ) from error

    def close(self) -> None:
        """Lets go of the shards; a later `read` opens them again."""
        self._open.clear()

    def _headers(self) -> dict[str, TensorInfo]:
        if not self.path.is_dir():
            raise MissingFileError(
                str(self.path),
                found="a file" if self.path.exists() else "nothing",
                expected="a checkpoint directory",
                next_step="Pass the directory that holds config.json and the safetensors files.",
            )
        if not (self.path / INDEX).exists():
            self._require_single()
            return read_header(self.path / SINGLE)
        index = read_json(self.path / INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) and Path(shard).name == shard
            for shard in cast("dict[str, object]", weight_map).values()
        ):
            raise CorruptFileError(
                f"{self.path / INDEX}: weight_map",
                found=type(cast("object", weight_map)).__name__,
                expected="an object of tensor names and file names",
                next_step=FETCH_AGAIN,
            )
        shard_of = cast(dict[str, str], weight_map)
        missing = sorted({shard for shard in shard_of.values() if not (self.path / shard).exists()})
        if missing:
            raise MissingFileError(
                str(self.path),
                found=f"no {', '.join(missing)}",
                expected=f"all {len(set(shard_of.values()))} shards that {INDEX} names",
                next_step="Fetch the missing shards.",
            )
        infos: dict[str, TensorInfo] = {}
        for shard in sorted(set(shard_of.values())):
            infos.update(read_header(self.path / shard))
        for name, shard in shard_of.items():
            if name not in infos:
                raise TensorError(
                    f"{self.path / shard}: {name}",
                    found="no such tensor",
                    expected=f"the tensor, as {INDEX} says",
                    next_step="The index and the shards are of different checkpoints: fetch both again.",
                )
        return infos

    def _require_single(self) -> None:
        if (self.path / SINGLE).exists():
            return
        pickles = sorted(p.name for p in (*self.path.glob("*.bin"), *self.path.glob("*.pt")))
        raise MissingFileError(
            str(self.path),
            found=f"only pickled weights ({pickles[0]})" if pickles else f"no {SINGLE} and no {INDEX}",
            expected=f"{SINGLE}, or shards with {INDEX}",
            next_step="Convert the weights with safetensors; fanfold opens no pickles."
            if pickles
            else "Pass the directory of a whole checkpoint.",
        )


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and shapes of one safetensors file.

    Raises:
        CorruptFileError: it is no safetensors file, is truncated, or holds a dtype unknown here.
    """
    infos: dict[str, TensorInfo] = {}
    try:
        with cast("Any", safe_open)(str(file), framework="pt") as shard:
            for name in cast("list[str]", shard.keys()):
                piece = shard.get_slice(name)
                dtype = DTYPES.get(piece.get_dtype())
                if dtype is None:
                    raise CorruptFileError(
                        f"{file}: {name}",
                        found=f"dtype {piece.get_dtype()}",
                        expected=f"one of {', '.join(DTYPES)}",
                        next_step="The file needs a newer fanfold, or another format.",
                    )
                infos[name] = TensorInfo(dtype, tuple(piece.get_shape()), file)
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(
            str(file), found=str(error), expected="a whole safetensors file", next_step=FETCH_AGAIN
        ) from error
    return infos


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file whose top is an object.

    Raises:
        MissingFileError: no such file.
        CorruptFileError: not JSON, or not an object.
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
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptFileError(str(file), found=str(error), expected="a JSON object", next_step=FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise CorruptFileError(str(file), found=type(value).__name__, expected="a JSON object", next_step=FETCH_AGAIN)
    return cast(dict[str, Any], value)
