"""Target: a format to quantise to, as compressed-tensors stores and describes it.

The configs are those that llmcompressor writes for its schemes NVFP4A16, MXFP4A16, W4A16 and FP8_DYNAMIC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fanfold.errors import ArgumentError
from fanfold.formats.codec import shapes
from fanfold.spec.weight_format import WeightFormat

GROUP_SIZE = 128  # of int4, where none is asked for
VERSION = "0.19.0"  # of compressed-tensors, whose config this is
SUFFIXES = {
    "packed": "weight_packed",
    "weight": "weight",
    "scale": "weight_scale",
    "global_scale": "weight_global_scale",
}
NVFP4: Mapping[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
MXFP4: Mapping[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}
INT4: Mapping[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group"}
FP8: Mapping[str, Any] = {"num_bits": 8, "type": "float", "strategy": "channel"}
# What an engine does with the activations of FP8 weights: a scale a token, found as it runs.
PER_TOKEN: Mapping[str, Any] = {**FP8, "strategy": "token"}


@dataclass(frozen=True)
class Slot:
    """A tensor of a file before it is there: its name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Target:
    """A format to quantise to.

    Attributes:
        name: what `quantize` is asked for: nvfp4, mxfp4, int4 or fp8.
        format: how each W [N, K] is packed.
        layout: compressed-tensors' name of it.
        weights: what its config says of the weights, where it is not the same for all targets.
        activations: likewise of the activations; None where they stay as they are.
    """

    name: str
    format: WeightFormat
    layout: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None

    def slots(self, module: str, n: int, k: int, dtype: torch.dtype) -> list[Slot]:
        """The tensors of W [N, K] of a module in the file; `dtype` is that of the weights before.

        Raises:
            UnsupportedError: the packing can't hold such sizes.
        """
        slots: list[Slot] = []
        for field, wanted in shapes(self.format, n, k).items():
            if wanted.required:
                stored = dtype if dtype in wanted.dtypes else wanted.dtypes[0]
                slots.append(Slot(f"{module}.{SUFFIXES[field]}", stored, wanted.shape or (1,)))
        if self.format.kind == "packed":
            slots.append(Slot(f"{module}.weight_shape", torch.int64, (2,)))
        return slots

    def config(self, ignore: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of a checkpoint in which the Linears of `ignore` are as they were."""
        group = {
            "format": self.layout,
            "input_activations": None
            if self.activations is None
            else _arguments(self.activations, dynamic=True, observer=None),
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _arguments(self.weights, dynamic=False, observer="memoryless_minmax"),
        }
        return {
            "config_groups": {"group_0": group},
            "format": self.layout,
            "global_compression_ratio": None,
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": VERSION,
        }


def target_of(name: str, group_size: int | None = None) -> Target:
    """The target of that name.

    Args:
        name: nvfp4, mxfp4, int4 or fp8.
        group_size: consecutive k that share a scale, of int4 alone; None takes 128.

    Raises:
        ArgumentError: no such target, or a group size that it can't have.
    """
    if name == "int4":
        size = GROUP_SIZE if group_size is None else group_size
        if size < 1:
            raise ArgumentError(
                "group_size",
                found=str(size),
                expected="a positive number",
                next_step="Leave it out (128), or pass e.g. 32 or 64.",
            )
        fmt = WeightFormat("packed", 4, group_size=size)
        return Target(name, fmt, "pack-quantized", {**INT4, "group_size": size})
    fixed = {
        "nvfp4": Target("nvfp4", WeightFormat.parse("nvfp4-divisor"), "nvfp4-pack-quantized", NVFP4),
        "mxfp4": Target("mxfp4", WeightFormat.parse("mxfp4"), "mxfp4-pack-quantized", MXFP4),
        "fp8": Target("fp8", WeightFormat.parse("fp8-channel"), "float-quantized", FP8, PER_TOKEN),
    }
    if name not in fixed:
        raise ArgumentError(
            "format",
            found=repr(name),
            expected="nvfp4, mxfp4, int4 or fp8",
            next_step="Pass one of them.",
        )
    if group_size is not None:
        raise ArgumentError(
            "group_size",
            found=f"{group_size}, with {name}",
            expected="none, as only int4 leaves it open",
            next_step="Leave it out, or quantise to int4.",
        )
    return fixed[name]


def _arguments(stated: Mapping[str, Any], *, dynamic: bool, observer: str | None) -> dict[str, Any]:
    """compressed-tensors' arguments of one kind of tensor, all of them."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": dynamic,
        "group_size": None,
        "num_bits": None,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": None,
        "strategy": None,
        "symmetric": True,
        "type": None,
        "zp_dtype": None,
        **stated,
    }
