"""What rounding did to the experts of a layer: the relative error of each projection, and its worst expert."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class ProjectionErrors:
    """Collects ||decoded - W|| and ||W|| (Frobenius) of one projection, expert by expert."""

    def __init__(self) -> None:
        self._squares: list[tuple[float, float]] = []

    def add(self, weight: Tensor, decoded: Tensor) -> None:
        """The next expert: W [N, K], and what its packed tensors stand for."""
        self._squares.append((_square(decoded - weight), _square(weight)))

    def report(self) -> dict[str, Any]:
        """`relative_error` over all experts; `worst_expert` and its own error."""
        each = [_relative(*squares) for squares in self._squares]
        worst = max(range(len(each)), key=each.__getitem__)
        differences, sizes = zip(*self._squares, strict=True)
        return {
            "relative_error": _relative(sum(differences), sum(sizes)),
            "worst_expert": worst,
            "worst_relative_error": each[worst],
        }


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum(dtype=torch.float64).item())


def _relative(difference: float, size: float) -> float:
    """Of squares; nothing of nothing is no error."""
    return math.sqrt(difference / size) if difference else 0.0
