"""What the products of a layer multiply: activations as they are, or as the numbers that NVFP4 makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fanfold.kernels.nvfp4.round import round_rows
from fanfold.kernels.nvfp4.run import global_scales
from fanfold.spec.adapters import Aside

Weights = TypeVar("Weights")
Given = TypeVar("Given", covariant=True)


class Operands(Protocol[Given]):
    """The operands of one projection."""

    def of(
        self, x: Tensor, topk_ids: Tensor, top_k: int, sorted_rows: Tensor | None = None
    ) -> tuple[Tensor, Given, int]:
        """What is multiplied.

        Args:
            x: [T, K] of gate_up; of down [R, K] in the order of the product's rows.
            topk_ids: [T, k], contiguous.
            top_k: rows of the product that share one of x: k for gate_up, 1 for down.
            sorted_rows: int32 [R], the order of down's rows; None: as they come.

        Returns:
            Activations, weights, and the rows of the product that share one of these activations (by row where 1).
        """
        ...


class Plain(Generic[Weights]):
    """Activations and weights as they are."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def of(
        self, x: Tensor, topk_ids: Tensor, top_k: int, sorted_rows: Tensor | None = None
    ) -> tuple[Tensor, Weights, int]:
        """See Operands."""
        return x, self.weights, top_k


class Nvfp4(Generic[Weights]):
    """Activations rounded to NVFP4 with their experts' global scales, which the weights' global scales take in.

    Args:
        weights: of the projection.
        scales: fp32 [E] of the checkpoint; 0: made at each call.
        with_scales: the weights with global scales that multiply these as well.
    """

    def __init__(self, weights: Weights, scales: Tensor, with_scales: Callable[[Weights, Tensor], Weights]) -> None:
        numbers = cast("list[float]", scales.tolist())
        self.scales = scales
        self.dynamic = 0.0 in numbers
        self.alike = not self.dynamic and len(set(numbers)) == 1
        self.with_scales = with_scales
        self.weights = weights if self.dynamic else with_scales(weights, scales)

    def of(
        self, x: Tensor, topk_ids: Tensor, top_k: int, sorted_rows: Tensor | None = None
    ) -> tuple[Tensor, Weights, int]:
        """See Operands. Where all scales are alike, one row of a token serves all its experts."""
        if self.alike:
            return round_rows(x, self.scales), self.weights, top_k
        ids, scales, weights = topk_ids.flatten(), self.scales, self.weights
        if self.dynamic:
            scales = self._of_call(x, ids, top_k, sorted_rows)
            weights = self.with_scales(weights, scales)
        return round_rows(x, scales, ids, sorted_rows, top_k), weights, 1

    def _of_call(self, x: Tensor, ids: Tensor, top_k: int, sorted_rows: Tensor | None) -> Tensor:
        """All scales: those that the checkpoint lacks made of their experts' rows; nothing is read back."""
        experts = ids.long() if sorted_rows is None else ids[sorted_rows.long()].long()
        inside = (experts >= 0) & (experts < len(self.scales))
        source = torch.arange(len(ids), dtype=torch.int32, device=x.device) // top_k
        here = torch.ones_like(self.scales, dtype=torch.bool)
        return global_scales(x, source, torch.where(inside, experts, 0), inside, self.scales, here)


def by_row(aside: Aside | None, top_k: int) -> Aside | None:
    """What is set aside, for activations of which `top_k` rows share one."""
    if aside is None or aside.top_k == top_k:
        return aside
    return Aside(aside.y1, aside.adapter_ids.repeat_interleave(aside.top_k), aside.slots, top_k)
