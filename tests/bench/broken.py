"""Layers that are wrong in one way each."""

from typing import Any

import torch
from torch import Tensor

from fanfold.layers.experts import Experts


class ScaledExperts(Experts):
    """Every value 0.6 % too large: less than twice the error of bf16 weights."""

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        return super().forward(*arguments, **options) * torch.tensor(1.006, dtype=torch.bfloat16).float()


class SlipExperts(Experts):
    """One value of one token off by about what values are."""

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        out = super().forward(*arguments, **options).clone()
        out[0, 3] += 0.5 * out[0].float().std()
        return out


class LostExperts(Experts):
    """A token without its last slot."""

    def forward(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, *others: Any) -> Tensor:
        ids = topk_ids.clone()
        ids[-1, -1] = -1
        return super().forward(hidden, ids, topk_weights, *others)


class NanExperts(Experts):
    """A value that was never written."""

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        out = super().forward(*arguments, **options).clone()
        out[-1, -1] = torch.nan
        return out


class BaseExperts(Experts):
    """All tokens as if they had no adapter."""

    def forward(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, *_: Any) -> Tensor:
        return super().forward(hidden, topk_ids, topk_weights)
