"""All-to-all: every rank has tokens of its own; they travel to the ranks of their experts, and results come back.

What travels with a token: the numbers its experts have there, their router weights, and its adapter slot.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fanfold.distributed.exchange import RunExperts
from fanfold.distributed.peers import Peers
from fanfold.distributed.places import Places
from fanfold.errors import ArgumentError

_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # before torch 2.13


class AllToAll:
    """A token travels once to each rank that has some of its experts, and buffers are as large as that needs.

    Counts are exchanged on the device and then read, once a call: sizes depend on the routing, so that no CUDA graph
    can be captured. A rank may have any number of tokens, or none.

    Args:
        peers: of the group.
        places: of this rank.
    """

    def __init__(self, peers: Peers, places: Places) -> None:
        self._peers = peers
        self._places = places

    def __call__(
        self, run: RunExperts, hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None
    ) -> Tensor:
        """See Exchange."""
        (tokens, top_k), ranks, group = ids.shape, self._peers.size, self._peers.group
        ranks_of, numbers = self._places.of(ids)
        elsewhere = torch.where(ranks_of < 0, ranks, ranks_of).long()
        goes = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=ids.device).scatter_(1, elsewhere, True)
        goes = goes[:, :ranks].T.reshape(-1)  # by rank, then by token
        sizes = torch.empty((2, ranks), dtype=torch.int64, device=ids.device)
        sizes[0] = goes.view(ranks, tokens).sum(1)
        dist.all_to_all_single(sizes[1], sizes[0], group=group)
        sent, received = cast("list[list[int]]", sizes.tolist())

        places = goes.cumsum(0)
        order = torch.searchsorted(places, torch.arange(1, sum(sent) + 1, device=ids.device))
        token, to = order % max(tokens, 1), order // max(tokens, 1)
        own = torch.where(ranks_of[token] == to[:, None], numbers[token], -1)
        beside = _beside(own, weights[token], None if adapter_ids is None else adapter_ids[token])
        x = self._moved(hidden[token], received, sent)
        beside = self._moved(beside, received, sent)

        y = run(x, *_apart(beside, top_k))
        back = hidden.new_zeros((len(order) + 1, hidden.shape[1]))  # the last row is of slots that stand for no result
        dist.all_to_all_single(back[:-1], y.contiguous(), sent, received, group=group)

        # A rank's sum over a token's slots stands where the first of them is.
        again = (ranks_of[:, :, None] == ranks_of[:, None, :]).tril(-1).any(-1)
        stands = (ranks_of >= 0) & ~again
        at = (places.view(ranks, tokens) - 1).T.gather(1, elsewhere.clamp_max(ranks - 1))
        rows = back[torch.where(stands, at, len(order)).flatten()]
        return _sum(rows, torch.where(stands, 0, -1))

    def _moved(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        out = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(out, rows, received, sent, group=self._peers.group)
        return out


class Bounded:
    """Every rank's tokens go to all ranks, padded to one bound; results come back in blocks of it.

    Sizes depend on the bound alone and nothing is read: a CUDA graph can be captured, and replays for any routing. No
    row is ever dropped: a smaller block than all tokens of a rank could be too small for some routing.

    Args:
        peers: of the group.
        places: of this rank.
        bound: most rows of a rank.
    """

    def __init__(self, peers: Peers, places: Places, bound: int) -> None:
        self._peers = peers
        self._places = places
        self._bound = bound

    def __call__(
        self, run: RunExperts, hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None
    ) -> Tensor:
        """See Exchange.

        Raises:
            ArgumentError: more rows than the bound.
        """
        (tokens, top_k), ranks, bound = ids.shape, self._peers.size, self._bound
        if tokens > bound:
            raise ArgumentError(
                "all_to_all with a bound",
                found=f"{tokens} rows",
                expected=f"at most {bound}",
                next_step="Make the layer with a larger bound: the most tokens of a rank, times k where it is exact.",
            )
        known = torch.where((ids >= 0) & (ids < self._places.num_experts), ids, -1)
        beside = _beside(known, weights, adapter_ids)
        x = self._gathered(pad(hidden, (0, 0, 0, bound - tokens)))
        beside = self._gathered(pad(beside, (0, 0, 0, bound - tokens), value=-1))
        own, weights, adapter_ids = _apart(beside, top_k)
        own = self._places.local_ids(own.view(ranks, bound, top_k)).view(ranks * bound, top_k)

        y = run(x, own, weights, adapter_ids).contiguous()
        back = torch.empty_like(y)
        dist.all_to_all_single(back, y, group=self._peers.group)
        rows = back.view(ranks, bound, -1)[:, :tokens].transpose(0, 1).reshape(tokens * ranks, hidden.shape[1])
        return _sum(rows, torch.zeros((tokens, ranks), dtype=torch.int32, device=ids.device))

    def _gathered(self, rows: Tensor) -> Tensor:
        out = rows.new_empty((self._peers.size * self._bound, rows.shape[1]))
        getattr(dist, _GATHER)(out, rows, group=self._peers.group)
        return out


def _beside(numbers: Tensor, weights: Tensor, adapter_ids: Tensor | None) -> Tensor:
    """int32 [n, 2 k + 1]: numbers of experts, bits of fp32 weights, and the adapter slot (-1 for the base)."""
    slots = torch.full_like(numbers[:, :1], -1) if adapter_ids is None else adapter_ids.clamp(-1, 2**31 - 1)[:, None]
    return torch.cat((numbers.int(), weights.float().view(torch.int32), slots.int()), 1)


def _apart(beside: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, weights and adapter slots of `_beside`."""
    weights = beside[:, top_k : 2 * top_k].contiguous().view(torch.float32)
    return beside[:, :top_k].contiguous(), weights, beside[:, 2 * top_k].contiguous()


def _sum(rows: Tensor, here: Tensor) -> Tensor:
    """[T, H]: fp32 sums of rows [T * n, H] where `here` [T, n] is 0, in order, rounded once."""
    ones = torch.ones(here.shape, dtype=torch.float32, device=here.device)
    return torch.ops.fanfold.combine(rows, here, ones, 1)
