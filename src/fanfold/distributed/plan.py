"""ExpertPlan: how the experts of a checkpoint are spread over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from fanfold.distributed.exchange import ExchangeName
from fanfold.distributed.placement import Placement
from fanfold.errors import ArgumentError


@dataclass(frozen=True)
class ExpertPlan:
    """How the experts of a checkpoint are spread over the ranks of a group; the same on all ranks.

    Attributes:
        group: of torch.distributed; None for all ranks.
        placements: layer -> which rank holds which experts. None: consecutive experts, equally many on each rank.
        exchange: see ExpertParallel.
        exact: see ExpertParallel.
        bound: see ExpertParallel.
    """

    group: ProcessGroup | None = None
    placements: Mapping[int, Placement] | None = None
    exchange: ExchangeName = "all_reduce"
    exact: bool = True
    bound: int | None = None

    def placement(self, layer: int, num_experts: int, ranks: int) -> Placement:
        """The placement of a layer of `num_experts` experts.

        Raises:
            ArgumentError: there is none for the layer, or it is of other experts or ranks.
        """
        if self.placements is None:
            return Placement.even(num_experts, ranks)
        found = self.placements.get(layer)
        if found is None or (found.num_experts, len(found.ranks)) != (num_experts, ranks):
            raise ArgumentError(
                f"ExpertPlan.placements: layer {layer}",
                found="none" if found is None else f"{found.num_experts} experts on {len(found.ranks)} ranks",
                expected=f"a placement of {num_experts} experts on {ranks} ranks",
                next_step="Make one for every layer with experts: fanfold.distributed.placements_by_load.",
            )
        return found
