"""The weighted sum in readable torch (semantics: the layer, step 6)."""

from __future__ import annotations

import torch
from torch import Tensor


def combine(y2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int) -> Tensor:
    """act( sum over slots, in slot order, of fp32(weight) * fp32(y2) ).

    Args:
        y2: [T*k, H], row = token*k + slot.
        topk_ids: [T, k]; slots whose id is outside [0, E) add nothing, whatever y2 holds there.
        topk_weights: [T, k].
        num_experts: E.

    Returns:
        [T, H] in y2's dtype.
    """
    tokens, top_k = topk_ids.shape
    rows = y2.view(tokens, top_k, y2.shape[1]).float()
    here = (topk_ids >= 0) & (topk_ids < num_experts)
    out = torch.zeros((tokens, y2.shape[1]), dtype=torch.float32, device=y2.device)
    for slot in range(top_k):
        weighted = topk_weights[:, slot, None].float() * rows[:, slot]
        out = torch.where(here[:, slot, None], out + weighted, out)
    return out.to(y2.dtype)
