"""Work items of single rows; those of a plan are `routing.plan.plan_items`."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.work import WorkItems


def single_items(topk_ids: Tensor, num_experts: int) -> WorkItems:
    """Work items of a few tokens, one a row, without a plan and without a launch: the ids as they are.

    Args:
        topk_ids: int32 or int64 [T, k], contiguous (else they are copied); ids outside [0, E) are experts of another
            rank. They are read when the products run.
        num_experts: E.

    Raises:
        ArgumentError: topk_ids are no such array.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        found = f"{topk_ids.dtype} {list(topk_ids.shape)}".removeprefix("torch.")
        raise ArgumentError(
            "single_items: topk_ids",
            found=found,
            expected="int32 or int64 [T, k]",
            next_step="Pass the ids as the router gives them.",
        )
    ids = topk_ids.reshape(-1)
    return WorkItems(ids, ids, ids.shape[0], 1, True, num_experts)
