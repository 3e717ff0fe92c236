"""ExpertParallel: the experts of one layer over the ranks of a process group, as an nn.Module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fanfold.distributed.all_to_all import AllToAll, Bounded
from fanfold.distributed.digest import digest
from fanfold.distributed.exchange import EXCHANGES, AllReduce, ByRow, Exchange, ExchangeName
from fanfold.distributed.peers import peers_of
from fanfold.distributed.placement import Placement
from fanfold.distributed.places import Places
from fanfold.errors import ArgumentError
from fanfold.layers.arguments import check_call
from fanfold.layers.experts import Experts
from fanfold.layers.op import number_of
from fanfold.lora.rows import Rows
from fanfold.lora.site import ExpertPairs, Site

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class ExpertParallel(nn.Module):
    """The experts of one layer, each on one rank of a group or more; called like fanfold.Experts, on all ranks.

    Args:
        experts: this rank's own, in the order of `placement.ranks[rank]`.
        group: of torch.distributed; None for all ranks.
        placement: which rank holds which; None: consecutive experts, equally many on each rank.
        exchange: "all_reduce": all ranks have the same tokens, and each runs the rows of its own experts.
            "all_to_all": each rank has tokens of its own (or none), which travel to their experts and back.
        exact: every (token, slot) row is exchanged by itself, and a token's rows are added in slot order: the bits of a
            single process, where its experts run with the same configs (on a GPU: with batch_invariant=True). False:
            ranks add up what they have of a token, and these sums are exchanged: up to k times fewer bytes. A value
            then differs from the single process's by at most ((R + 1) u + 2 k 2^-24) S: R ranks, u half an ulp of 1 in
            the activations' dtype, S the sum over slots of |weight * y2|.
        bound: for "all_to_all": the most rows a rank ever has: tokens, times k where `exact`. Sizes are then fixed, all
            rows go to all ranks, and CUDA graphs can be captured. None: buffers as large as the routing needs, whose
            sizes the host reads once a call.

    Attributes:
        experts: as given.
        shape: of the whole layer.
        placement: as given or made.

    Raises:
        ArgumentError: no such exchange, a bound that it does not take, or experts that are not the placement's.
        RankError: ranks hold layers of unlike sizes, formats, dtypes or placements, or one of them is gone.
        UnavailableError: torch.distributed has not been initialised.
    """

    def __init__(
        self,
        experts: Experts,
        group: ProcessGroup | None = None,
        *,
        placement: Placement | None = None,
        exchange: ExchangeName = "all_reduce",
        exact: bool = True,
        bound: int | None = None,
    ) -> None:
        super().__init__()
        self.peers = peers_of(group)
        held = experts.shape.num_experts
        self.placement = Placement.even(held * self.peers.size, self.peers.size) if placement is None else placement
        self.shape = replace(experts.shape, num_experts=self.placement.num_experts)
        with self.peers.together(
            f"{experts.path}: experts of all ranks", **self._facts(experts, exchange, exact, bound)
        ):
            _check_exchange(exchange, bound)
            _check(experts, self.placement, self.peers.rank, self.peers.size)
        self.experts = experts
        self.exchange, self.exact, self.bound = exchange, exact, bound
        self.path, self.dtype = experts.path, experts.dtype
        self.interleaved, self.transposed, self.biased = experts.interleaved, experts.transposed, experts.biased
        self.number = number_of(self)
        self.exchanging = self._made()

    @property
    def device(self) -> torch.device:
        """Device of the weights and activations."""
        return self.experts.device

    @property
    def hidden_order(self) -> Tensor | None:
        """See lora.site.OrderedSite; of this rank's experts."""
        return self.experts.hidden_order

    @property
    def experts_here(self) -> Mapping[int, int]:
        """See lora.site.PartialSite."""
        return {expert: number for number, expert in enumerate(self.placement.ranks[self.peers.rank])}

    @property
    def adapter_sites(self) -> Mapping[str, Site]:
        """This layer as the only place of an adapter pool of its own."""
        return {self.path: self}

    @property
    def adapter_rows(self) -> Rows:
        """Which adapter each row of the running batch uses, on this rank."""
        return self.experts.adapter_rows

    @adapter_rows.setter
    def adapter_rows(self, rows: Rows) -> None:
        self.experts.adapter_rows = rows

    def together(self, what: str, folder: Path | None = None, /, **facts: str) -> AbstractContextManager[None]:
        """See lora.agreement.Together."""
        if folder is not None:
            facts["files"] = digest([folder / name for name in ADAPTER_FILES])
        return self.peers.together(what, **facts)

    def reserve(self, slots: int, max_rank: int) -> None:
        """Makes room for a pool of so many slots and ranks; all slots are empty then."""
        self.experts.reserve(slots, max_rank)

    def unknown_ids(self) -> int:
        """Tokens seen by this rank with an adapter id that is no slot's; counted on a GPU alone."""
        return self.experts.unknown_ids()

    def put(self, slot: int, pairs: ExpertPairs) -> None:
        """Fills a slot with pairs of this rank's experts, by their numbers here: see fanfold.Experts."""
        self.experts.put(slot, pairs)

    def drop(self, slot: int) -> None:
        """Empties a slot."""
        self.experts.drop(slot)

    @property
    def implementation(self) -> str:
        """The name of the one that runs this rank's experts."""
        return self.experts.implementation

    def forward(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None = None
    ) -> Tensor:
        """The weighted sum over each token's experts, wherever they are. A collective call: every rank makes it.

        Args:
            hidden: [T, H], bf16, fp16 or fp32.
            topk_ids: int32 or int64 [T, k], experts of the whole layer; an id outside [0, E) adds nothing.
            topk_weights: [T, k], bf16, fp16 or fp32.
            adapter_ids: int32 or int64 [T]: see fanfold.Experts.

        Returns:
            [T, H] in hidden's dtype.

        Raises:
            RankError: a rank is gone, or does not make the same call.
            FanfoldError: what fanfold.Experts raises.
        """
        check_call(hidden, topk_ids, topk_weights, adapter_ids, self.shape.hidden, self.device)
        if adapter_ids is None:
            adapter_ids = self.experts.adapter_rows.ids(hidden.shape[0])
        return torch.ops.fanfold.experts(hidden, topk_ids, topk_weights, adapter_ids, self.number)

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None) -> Tensor:
        """`forward` behind its checks: what torch.ops.fanfold.experts calls."""
        with self.peers.naming(f"{self.path}: {self.exchange}"):
            return self.exchanging(self.experts.run, hidden, topk_ids, topk_weights, adapter_ids)

    def extra_repr(self) -> str:
        """How the experts are spread."""
        return f"rank {self.peers.rank} of {self.peers.size}, E={self.shape.num_experts}, {self.exchange}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves the experts, and the tables by which they are found."""
        super()._apply(fn, recurse)
        self.exchanging = self._made()
        return self

    def _made(self) -> Exchange:
        places = Places(self.placement, self.peers.rank, self.device)
        exchange: Exchange
        if self.exchange == "all_reduce":
            exchange = AllReduce(self.peers, places)
        elif self.bound is None:
            exchange = AllToAll(self.peers, places)
        else:
            exchange = Bounded(self.peers, places, self.bound)
        return ByRow(exchange, self.shape.num_experts) if self.exact else exchange

    def _facts(self, experts: Experts, exchange: str, exact: bool, bound: int | None) -> dict[str, str]:
        formats = (replace(fmt, act_order=False).name for fmt in experts.formats)  # which may be of single experts
        return {
            "sizes": str(self.shape),
            "formats": ", ".join(formats),
            "activation": f"{experts.activation}, {experts.activation_format}",
            "dtype": str(experts.dtype),
            "placement": str(self.placement.ranks),
            "exchange": f"{exchange}, exact={exact}, bound={bound}",
        }


def _check_exchange(exchange: str, bound: int | None) -> None:
    if exchange not in EXCHANGES:
        raise ArgumentError(
            "ExpertParallel: exchange",
            found=repr(exchange),
            expected=f"one of {', '.join(EXCHANGES)}",
            next_step='Pass exchange="all_reduce" where all ranks have the same tokens.',
        )
    if bound is not None and (bound < 1 or exchange != "all_to_all"):
        raise ArgumentError(
            "ExpertParallel: bound",
            found=f"{bound} for {exchange}",
            expected="at least 1 row, for all_to_all",
            next_step="Leave it out for all_reduce, whose sizes are fixed anyway.",
        )


def _check(experts: Experts, placement: Placement, rank: int, ranks: int) -> None:
    found = experts.shape.num_experts
    if len(placement.ranks) != ranks or len(placement.ranks[rank]) != found:
        raise ArgumentError(
            "ExpertParallel: experts",
            found=f"{found} experts on rank {rank} of {ranks}",
            expected=f"those of the placement: {', '.join(str(len(held)) for held in placement.ranks)} by rank",
            next_step="Load the experts of placement.ranks[rank] on each rank.",
        )
