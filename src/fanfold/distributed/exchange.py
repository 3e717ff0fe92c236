"""Exchanges: how the rows of tokens meet experts that are spread over ranks, and come back."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from fanfold.distributed.peers import Peers
from fanfold.distributed.places import Places

ExchangeName = Literal["all_reduce", "all_to_all"]
EXCHANGES: tuple[ExchangeName, ...] = get_args(ExchangeName)


class RunExperts(Protocol):
    """The experts of this rank."""

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None, /) -> Tensor:
        """[T, H] from [T, H], the rank's own ids int32 [T, k] (-1 adds nothing), [T, k] and int32 [T]."""
        ...


class Exchange(Protocol):
    """A layer over all ranks, from what one of them has: the sum over each token's experts."""

    def __call__(
        self, run: RunExperts, hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None, /
    ) -> Tensor:
        """[T, H] from [T, H], the layer's ids [T, k], weights [T, k] and adapter slots [T]."""
        ...


class AllReduce:
    """Every rank has the same tokens, runs the rows of its own experts, and an all-reduce adds the results.

    Nothing depends on the routing but numbers: a CUDA graph can be captured, and replays for any.

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
        out = run(hidden, self._places.local_ids(ids), weights, adapter_ids)
        dist.all_reduce(out, group=self._peers.group)
        return out


class ByRow:
    """Exchanges the result of every (token, slot) row by itself, and adds a token's rows where the token is.

    A row is in one rank's result, rounded as y2 is, and 0 in all others: its sum over ranks is exact. So the weighted
    sum over slots is the one of a single process, in the same order. It costs up to k times the bytes.

    Args:
        exchange: of the rows, each as a token of one slot.
        num_experts: E.
    """

    def __init__(self, exchange: Exchange, num_experts: int) -> None:
        self._exchange = exchange
        self._num_experts = num_experts

    def __call__(
        self, run: RunExperts, hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None
    ) -> Tensor:
        """See Exchange."""
        tokens, top_k = ids.shape
        rows = self._exchange(
            run,
            hidden.repeat_interleave(top_k, 0),
            ids.reshape(-1, 1),
            torch.ones((tokens * top_k, 1), dtype=torch.float32, device=hidden.device),
            None if adapter_ids is None else adapter_ids.repeat_interleave(top_k),
        )
        return torch.ops.fanfold.combine(rows, ids, weights, self._num_experts)
