"""Tensors without values, for the launches that are compiled."""

from __future__ import annotations

import torch

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "i32": torch.int32,
    "u8": torch.uint8,
    "u64": torch.int64,
}


def torch_dtype(name: str) -> torch.dtype:
    """Of a name of `description.BYTES`."""
    return _DTYPES[name]


def empty(*shape_and_dtype: int | str) -> torch.Tensor:
    """`empty(4, 8, "bf16")`: on no device."""
    *shape, dtype = shape_and_dtype
    return torch.empty([int(size) for size in shape], dtype=_DTYPES[str(dtype)], device="meta")
