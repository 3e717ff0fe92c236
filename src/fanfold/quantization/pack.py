"""Pack: the halves of one expert's projection to the tensors of a target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fanfold.formats import codec, fp8, packed
from fanfold.quantization.target import SUFFIXES, Target


def pack(target: Target, weight: Tensor) -> list[dict[str, Tensor]]:
    """Gate and up of one expert, or its down, rounded to nearest.

    All rows are packed as one matrix, so that gate and up share their global scale, as llmcompressor has it: engines
    that multiply both at once take one number for the two.

    Args:
        target: the format to make.
        weight: bf16 or fp16 [P, N, K], finite.

    Returns:
        For each half, canonical name -> tensor. Scales of integers and FP8 have the dtype of the weights.

    Raises:
        UnsupportedError: the packing can't hold such sizes.
    """
    halves = len(weight)
    rows = weight.flatten(0, 1).float()
    if target.format.kind == "packed":
        tensors = packed.quantize(target.format, rows, scale_dtype=weight.dtype)
    elif target.format.kind == "fp8":
        tensors = fp8.quantize(target.format, rows, scale_dtype=weight.dtype)
    else:
        tensors = codec.quantize(target.format, rows)
    chunks = {name: t.chunk(halves) if t.dim() else (t,) * halves for name, t in tensors.items()}
    return [{name: parts[half] for name, parts in chunks.items()} for half in range(halves)]


def named(target: Target, module: str, tensors: Mapping[str, Tensor], n: int, k: int) -> dict[str, Tensor]:
    """The tensors of one half, W [N, K], under their names in the file and in their shapes there."""
    stored = {f"{module}.{SUFFIXES[name]}": tensor.reshape(tensor.shape or (1,)) for name, tensor in tensors.items()}
    if target.format.kind == "packed":
        stored[f"{module}.weight_shape"] = torch.tensor([n, k])
    return stored
