"""Device tables of a site's pairs: addresses that captured graphs read, rewritten in place as adapters come and go."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.kernels.lora.table import new_table, pack_pairs, write_slot
from fanfold.layers.implementations import Adapters
from fanfold.lora.adapter import Projection
from fanfold.lora.site import ExpertPairs
from fanfold.spec.lora import LoraPair
from fanfold.spec.shape import ExpertShape


class ExpertTables:
    """The tables of one expert layer. Pairs are those of `lora.convert`; who puts them keeps them alive.

    Attributes:
        gate_up: of gate and up (up alone without a gate).
        down: of down.
        unknown: int32 [1], tokens seen with an id that is no slot's.
    """

    def __init__(self, shape: ExpertShape, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        experts, hidden, intermediate = shape.num_experts, shape.hidden, shape.intermediate
        self.gate_up = new_table(
            shape.halves, slots, experts, k=hidden, n=intermediate, max_rank=max_rank, dtype=dtype, device=device
        )
        self.down = new_table(
            1, slots, experts, k=intermediate, n=hidden, max_rank=max_rank, dtype=dtype, device=device
        )
        self.unknown = torch.zeros(1, dtype=torch.int32, device=device)

    def write(self, slot: int, pairs: ExpertPairs) -> None:
        """Replaces all entries of a slot, on the current stream; no pairs empty it."""
        of: dict[Projection, dict[int, LoraPair]] = {"gate": {}, "up": {}, "down": {}}
        for (projection, expert), pair in pairs.items():
            of[projection][expert] = pair
        halves = (of["gate"], of["up"]) if self.gate_up.projections == 2 else (of["up"],)
        for number, half in enumerate(halves):
            write_slot(self.gate_up, number, slot, pack_pairs(half))
        write_slot(self.down, 0, slot, pack_pairs(of["down"]))

    def adapters(self, adapter_ids: Tensor | None) -> Adapters | None:
        """The adapters of a call: int32 or int64 [T]; an id beyond int32 stays out of every pool's range.

        None for None: all rows are the base's.
        """
        if adapter_ids is None:
            return None
        ids = adapter_ids if adapter_ids.dtype == torch.int32 else adapter_ids.clamp(-1, 2**31 - 1).int()
        return Adapters(self.gate_up, self.down, ids.contiguous(), self.unknown)


class LinearTable:
    """The table of a plain module: one projection, one expert."""

    def __init__(
        self, inputs: int, outputs: int, slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.table = new_table(1, slots, 1, k=inputs, n=outputs, max_rank=max_rank, dtype=dtype, device=device)
        self.unknown = torch.zeros(1, dtype=torch.int32, device=device)

    def write(self, slot: int, pair: LoraPair | None) -> None:
        """Replaces a slot's pair; None empties it."""
        write_slot(self.table, 0, slot, None if pair is None else pack_pairs({0: pair}))
