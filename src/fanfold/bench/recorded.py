"""Recorded routings: which experts a text's tokens used in a real model, from a file of `fanfold routing --record`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fanfold.bench.jobs import LayerShape
from fanfold.bench.seeds import generator_of
from fanfold.errors import ArgumentError, CorruptFileError, MissingFileError

NAME = "layers.{}.topk_ids"
PREFIX = "recorded:"


@dataclass(frozen=True, eq=False)
class Recorded:
    """Experts of tokens, by layer.

    Attributes:
        path: the file.
        layers: layer -> int32 [tokens, k].
    """

    path: Path
    layers: Mapping[int, Tensor] = field(repr=False)

    def __str__(self) -> str:
        """As it is asked for."""
        return f"{PREFIX}{self.path}"

    def draw(self, shape: LayerShape, tokens: int, seed: int) -> Tensor:
        """Consecutive tokens of one layer, from a random one on; behind the last comes the first.

        Args:
            shape: what they are for.
            tokens: T.
            seed: which layer, and where to begin.

        Returns:
            int32 [T, k].

        Raises:
            ArgumentError: the file is of a model with another k, or more experts.
        """
        layer = sorted(self.layers)[seed % len(self.layers)]
        ids = self.layers[layer]
        most = int(ids.max()) + 1
        if ids.shape[1] != shape.top_k or most > shape.experts.num_experts:
            raise ArgumentError(
                str(self),
                found=f"{ids.shape[1]} experts a token, {most} experts or more, in layer {layer}",
                expected=f"{shape.top_k} a token, at most {shape.experts.num_experts}, as {shape.name} has",
                next_step="Name the shape of the model whose routing was recorded.",
            )
        start = int(torch.randint(len(ids), (1,), generator=generator_of("routing", seed)))
        return ids[(torch.arange(tokens) + start) % len(ids)]


def write(path: Path, layers: Mapping[int, Tensor]) -> None:
    """A file of integers [tokens, k] by layer.

    Raises:
        ArgumentError: it can't be written.
    """
    tensors = {NAME.format(layer): ids.int().contiguous() for layer, ids in layers.items()}
    try:
        cast("Any", safetensors.torch).save_file(tensors, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ArgumentError(
            str(path),
            found=str(error),
            expected="a file that can be written",
            next_step="Name one in a folder of yours.",
        ) from error


def read(path: Path) -> Recorded:
    """The routings of a file.

    Raises:
        MissingFileError: there is none.
        CorruptFileError: it holds something else.
    """
    if not path.is_file():
        raise MissingFileError(
            str(path),
            found="no such file",
            expected="routings of fanfold routing --record",
            next_step="Write it: fanfold routing CHECKPOINT --text FILE --record OUT.safetensors.",
        )
    try:
        tensors: dict[str, Tensor] = cast("Any", safetensors.torch).load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise _unlike(path, str(error)) from error
    layers: dict[int, Tensor] = {}
    for name, ids in tensors.items():
        match = re.fullmatch(NAME.format(r"(\d+)").replace(".", r"\."), name)
        good = ids.dtype == torch.int32 and ids.dim() == 2 and ids.numel() > 0
        if match is None or not good or int(ids.min()) < 0:
            kind = str(ids.dtype).removeprefix("torch.")
            raise _unlike(path, f"{name}, {kind} {list(ids.shape)}")
        layers[int(match[1])] = ids
    if not layers:
        raise _unlike(path, "no tensors")
    return Recorded(path, layers)


def _unlike(path: Path, found: str) -> CorruptFileError:
    return CorruptFileError(
        str(path),
        found=found,
        expected=f"{NAME.format('N')}, int32 [tokens, k] of experts, for every layer",
        next_step="Write it: fanfold routing CHECKPOINT --text FILE --record OUT.safetensors.",
    )
