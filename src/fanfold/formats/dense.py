"""Dense weights: bf16, fp16 or fp32 numbers, one a weight."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fanfold.formats.fields import Field, require_multiple
from fanfold.spec.weight_format import WeightFormat

FIELDS: Mapping[str, tuple[str, ...]] = {"weight": ("weight",)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be.

    Raises:
        UnsupportedError: N or K is not positive.
    """
    require_multiple(fmt, "N", n, 1)
    require_multiple(fmt, "K", k, 1)
    return {"weight": Field((n, k), (DTYPES[fmt.kind],))}


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W fp32 [N, K], exact."""
    return tensors["weight"].float()


def quantize(fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """W fp32 [N, K] rounded to nearest even in the format's dtype."""
    return {"weight": weight.to(DTYPES[fmt.kind])}
