"""The grouped product in readable torch (semantics: the layer, steps 3 and 5)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from fanfold.kernels.common.invariant import invariant_matmul


def grouped(
    x: Tensor, weight_of: Callable[[int], Tensor], expert_offsets: Tensor, n: int, bias: Tensor | None = None
) -> Tensor:
    """act(x W[e]^T + bias[e]) of rows that lie in expert order.

    Args:
        x: [R, K], rows in expert order; expert e owns [expert_offsets[e], expert_offsets[e+1]).
        weight_of: expert -> W fp32 [N, K]. Called once for each expert that has rows.
        expert_offsets: int32 [E+1].
        n: N.
        bias: [E, N] or None.

    Returns:
        [R, N] in x's dtype: fp32 sums, rounded once. Rows of no expert are 0.
    """
    out = torch.zeros((x.shape[0], n), dtype=x.dtype, device=x.device)
    offsets = cast("list[int]", expert_offsets.tolist())
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        y = invariant_matmul(x[start:end].float(), weight_of(expert))
        out[start:end] = (y if bias is None else y + bias[expert].float()).to(x.dtype)
    return out
