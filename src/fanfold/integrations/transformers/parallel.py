"""transformers' own words for experts over ranks: its DistributedConfig, and an ep_implementation of fanfold's."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from fanfold.distributed.exchange import AllReduce, ByRow
from fanfold.distributed.peers import peers_of
from fanfold.distributed.placement import Placement
from fanfold.distributed.places import Places
from fanfold.distributed.plan import ExpertPlan
from fanfold.errors import ArgumentError, UnsupportedError

NAME = "fanfold"
EXACT = {"auto": True, NAME: True, "all_reduce": False}
"""ep_implementation -> whether rows are exchanged one by one: see fanfold.distributed.ExpertParallel."""


def register_parallel() -> None:
    """Makes `DistributedConfig(ep_implementation="fanfold")` known to transformers."""
    EPImplementationInterface.register(NAME, FanfoldEP)


def plan_of(config: object) -> ExpertPlan:
    """What a DistributedConfig says of a checkpoint that fanfold loads: experts over all ranks, all else on each.

    Raises:
        ArgumentError: it is none.
        UnsupportedError: it asks for more, such as tensor-parallel attention.
    """
    if not isinstance(config, DistributedConfig):
        raise ArgumentError(
            "fanfold.load_model: parallel",
            found=type(config).__name__,
            expected="a fanfold.distributed.ExpertPlan or a transformers DistributedConfig",
            next_step="Pass ExpertPlan() to spread the experts over all ranks.",
        )
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    wanted: dict[str, object] = {
        "tp_size": ranks,
        "tp_plan": {},
        "ep_size": ranks,
        "ep_plan": None,
        "fsdp_size": 1,
        "dp_replicate_size": 1,
        "pp_size": 1,
    }
    unlike = [f"{name}={getattr(config, name)!r}" for name, value in wanted.items() if getattr(config, name) != value]
    if config.ep_implementation not in EXACT:
        unlike.append(f"ep_implementation={config.ep_implementation!r}")
    if unlike:
        raise UnsupportedError(
            "fanfold.load_model: DistributedConfig",
            found=", ".join(unlike),
            expected=f"tp_size={ranks}, tp_plan={{}}, ep_size={ranks} for {ranks} ranks, and ep_implementation one of "
            f"{', '.join(EXACT)}: experts spread, all else on every rank",
            next_step="Pass a fanfold.distributed.ExpertPlan for other groups, placements or exchanges.",
        )
    return ExpertPlan(exact=EXACT[config.ep_implementation])


class FanfoldEP(EPImplementation):
    """Ranks with one batch: rows are reduced one by one and added in slot order, so that the bits are one process's.

    transformers makes one for each experts module, and calls it with the whole layer's ids.
    """

    needs_shared_batch = True

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._held = cast("int", self.num_local_experts)
        self._peers = peers_of(ep_mesh.get_group())
        self._placement = Placement.even(self._held * self._peers.size, self._peers.size)
        self._exchanges: dict[torch.device, ByRow] = {}

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum over each token's experts, [T, H]."""
        device = hidden_states.device
        if device not in self._exchanges:  # when the layer is made its weights are nowhere yet
            places = Places(self._placement, self._peers.rank, device)
            self._exchanges[device] = ByRow(AllReduce(self._peers, places), self._placement.num_experts)
        with self._peers.naming(f"{NAME} experts: all_reduce"):
            return self._exchanges[device](self._run, hidden_states, top_k_index, top_k_weights, None)

    def _run(self, hidden: Tensor, ids: Tensor, weights: Tensor, _: Tensor | None) -> Tensor:
        # An expert of another rank is to transformers number `num_local_experts`, with weight 0.
        elsewhere = ids < 0
        own = torch.where(elsewhere, self._held, ids).long()
        forward: Any = self.experts_forward
        return forward(hidden, own, weights.masked_fill(elsewhere, 0.0))
