"""Route: which rows each expert gets, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Route:
    """The plan of one batch: rows in expert order.

    T tokens with k experts each make R = T*k rows; row = token*k + slot.
    Example, E = 3, k = 2, topk_ids = [[2, 0], [0, -1]]: rows 0..3 go to experts 2, 0, 0, none;
    expert_offsets = [0, 2, 2, 3], sorted_rows = [1, 2, 0, 3], positions = [2, 0, 1, 3].

    Attributes:
        expert_offsets: int32 [E+1], prefix sum of rows an expert; expert e owns sorted positions
            [expert_offsets[e], expert_offsets[e+1]).
        sorted_rows: int32 [R], sorted position -> row. Stable inside an expert. Rows of ids outside [0, E) (experts
            of another rank) come last, behind expert_offsets[E].
        positions: int32 [R], row -> sorted position (the inverse map).
        top_k: k.
    """

    expert_offsets: Tensor
    sorted_rows: Tensor
    positions: Tensor
    top_k: int

    @property
    def num_experts(self) -> int:
        """E."""
        return self.expert_offsets.shape[0] - 1
