"""Places: a placement as tables on the device, by which rows find their experts without the host."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from fanfold.distributed.placement import Placement

GOLDEN = 2654435769
"""2^32 over the golden ratio."""


class Places:
    """Tables [E + 1, C] of a placement, C the most copies of an expert; the last row is an id outside [0, E).

    Which of an expert's ranks a row goes to is told by its place in the batch alone: all ranks that look at a batch
    choose alike. Places are spread by a Weyl sequence (t times the golden ratio, modulo 1), so that any regular part of
    them, such as first slots, is dealt out equally too.

    Args:
        placement: of the layer.
        rank: whose experts `local_ids` finds.
        device: of the ids.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device) -> None:
        self.num_experts = placement.num_experts
        self.copies = torch.tensor([*placement.copies, 1], device=device)
        most = max(placement.copies)
        spread = [(*places, *[(-1, -1)] * (most - len(places))) for places in placement.places]
        flat = [*chain.from_iterable(spread), *[(-1, -1)] * most]
        table = torch.tensor(flat, dtype=torch.int32, device=device).view(self.num_experts + 1, most, 2)
        self._ranks, self._locals = table[..., 0].contiguous(), table[..., 1].contiguous()
        self._mine = torch.where(self._ranks == rank, self._locals, -1)

    def local_ids(self, ids: Tensor) -> Tensor:
        """int32 [..., T, k]: the number of each expert on this rank, -1 where another one runs the row.

        Args:
            ids: int32 or int64 [..., T, k], tokens of one batch along T.
        """
        return self._mine[self._place(ids)]

    def of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """int32 [T, k] each: the rank of every row, -1 for none, and the number of its expert there."""
        place = self._place(ids)
        return self._ranks[place], self._locals[place]

    def _place(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        experts = torch.where((ids >= 0) & (ids < self.num_experts), ids, self.num_experts).long()
        tokens = torch.arange(ids.shape[-2], device=ids.device)[:, None]
        spread = (tokens * GOLDEN) & 0xFFFFFFFF
        return experts, (spread * self.copies[experts]) >> 32
