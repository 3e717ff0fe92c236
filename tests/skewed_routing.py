"""Routings whose experts are unlike popular, and the table of how well placements spread them."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.distributed import Placement

EXPERTS, TOP_K, TOKENS, BATCH = 128, 8, 8192, 256
"""Qwen3-235B's; the tokens that loads are counted from and measured on; those of a batch."""
COPIES = 32


def popularity(experts: int, exponent: float, seed: int) -> Tensor:
    """[E]: the n-th of the experts is n^-exponent as popular as the first (Zipf), in random order."""
    share = torch.arange(1, experts + 1).double() ** -exponent
    return share[torch.randperm(experts, generator=torch.Generator().manual_seed(seed))]


def choices(share: Tensor, tokens: int, top_k: int, seed: int) -> Tensor:
    """[T, k]: experts of tokens that draw by popularity, none twice (the largest of log share + Gumbel noise)."""
    noise = torch.rand(tokens, len(share), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (share.log() - (-noise.log()).log()).topk(top_k).indices


def counts_of(share: Tensor, tokens: int, top_k: int, seed: int) -> Tensor:
    """Rows of each expert."""
    return choices(share, tokens, top_k, seed).flatten().bincount(minlength=len(share))


def placement_table() -> str:
    """Markdown: max/mean of ranks' rows, for all tokens that were not looked at and, in brackets, a batch of them."""
    copied = f"by load, {COPIES} copies"
    rows = [f"| popularity | ranks | even | by load | {copied} |", "|---|---|---|---|---|"]
    for exponent in (0.5, 1.0):
        share = popularity(EXPERTS, exponent, seed=0)
        seen = counts_of(share, TOKENS, TOP_K, seed=1).tolist()
        batches = choices(share, TOKENS, TOP_K, seed=2).view(-1, BATCH * TOP_K)
        each = torch.stack([batch.bincount(minlength=EXPERTS) for batch in batches]).double()
        for ranks in (8, 16, 32, 64):
            cells = []
            for placement in (
                Placement.even(EXPERTS, ranks),
                Placement.by_load(seen, ranks),
                Placement.by_load(seen, ranks, COPIES),
            ):
                parts = torch.tensor([[e in held for e in range(EXPERTS)] for held in placement.ranks]).double()
                loads = each @ (parts / parts.sum(0)).T
                whole, one = (rows.amax(-1) / rows.mean(-1) for rows in (loads.sum(0), loads))
                cells.append(f"{whole.item():.2f} ({one.mean().item():.2f})")
            rows.append(f"| n^-{exponent} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(rows)
