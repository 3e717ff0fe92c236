"""The layer with the portable product: every format, weights as they lie on disk."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.kernels.combine.combine import combine
from fanfold.kernels.common.device import arch_of
from fanfold.kernels.grouped.configs import config_for, pinned_config
from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up
from fanfold.routing.plan import plan_sort
from fanfold.spec.activation import Activation
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weights import ExpertWeights, ProjectionWeights


class Grouped:
    """Plan, gate_up with the activation, down, weighted sum: four launches, five for many rows.

    Args:
        weights: the packed experts, on the GPU.
        activation: between gate_up and down.
        batch_invariant: one config for any number of rows.
    """

    def __init__(self, weights: ExpertWeights, activation: Activation, batch_invariant: bool) -> None:
        self.packed = weights
        self.activation = activation
        self.batch_invariant = batch_invariant
        self.arch = arch_of(next(iter(weights.down.tensors.values())).device)

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weights."""
        return self.packed.nbytes

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See Implementation."""
        gate_up, down = self.packed.gate_up, self.packed.down
        experts, top_k, rows = gate_up.num_experts, topk_ids.shape[1], topk_ids.numel()
        first = self._config(gate_up, hidden.dtype, rows, fused=True)
        second = self._config(down, hidden.dtype, rows, fused=False)
        with torch.cuda.device_of(hidden):
            route, work = plan_sort(topk_ids, experts, first.block_t)
            h = grouped_gate_up(hidden, gate_up, work, route.sorted_rows, top_k, first, self.activation)
            y2 = grouped_down(h, down, work, route.sorted_rows, second, scatter=True)
            return combine(y2, topk_ids, topk_weights, experts)

    def _config(self, weights: ProjectionWeights, dtype: torch.dtype, rows: int, fused: bool) -> LaunchConfig:
        if self.batch_invariant:
            return pinned_config(weights.format, weights.k, dtype, self.arch, fused)
        return config_for(weights.format, weights.k, dtype, self.arch, rows, weights.num_experts, fused)
