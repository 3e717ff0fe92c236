"""LoraPair: the low-rank change of one projection of one expert (or of one Linear)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fanfold.errors import ArgumentError

RANK_ALIGN = 8
"""Elements that a stored rank is padded to: 16 bytes of a 16-bit dtype."""
MOST_RANK = 512
"""The largest rank of a pair."""


def padded_rank(rank: int) -> int:
    """The stored rank: rounded up to a multiple of RANK_ALIGN."""
    return -(-rank // RANK_ALIGN) * RANK_ALIGN


@dataclass(frozen=True, eq=False)
class LoraPair:
    """delta = scale * B (A x).

    Attributes:
        a: [r, K], shrinks the input.
        b: [N, r], expands to the output.
        scale: fp32 factor, alpha / r or alpha / sqrt(r); applied after delta is rounded, never folded into B.
    """

    a: Tensor
    b: Tensor
    scale: float

    def __post_init__(self) -> None:
        if self.a.dim() != 2 or self.b.dim() != 2 or self.a.shape[0] != self.b.shape[1] or self.a.shape[0] == 0:
            raise ArgumentError(
                "LoraPair",
                found=f"A {list(self.a.shape)}, B {list(self.b.shape)}",
                expected="A [r, K] and B [N, r] with one r >= 1",
                next_step="Pass the A and B of one projection of one expert.",
            )

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[0]
