"""The plan of a batch in readable torch (semantics: the layer, step 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.spec.route import Route


def plan_sort(topk_ids: Tensor, num_experts: int) -> Route:
    """Rows in expert order.

    Args:
        topk_ids: integers [T, k]. Ids outside [0, E) are experts of another rank: their rows come last and belong to
            no expert.
        num_experts: E.

    Returns:
        The Route of R = T*k rows, on the device of `topk_ids`.
    """
    ids = topk_ids.flatten().long()
    key = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    sorted_rows = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    positions = torch.empty_like(sorted_rows)
    positions[sorted_rows] = torch.arange(len(ids), device=ids.device)
    return Route(offsets, sorted_rows.to(torch.int32), positions.to(torch.int32), topk_ids.shape[1])
