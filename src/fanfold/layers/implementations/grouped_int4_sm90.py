"""The layer with the Hopper product: 4-bit weights, repacked once at load."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.kernels.combine.combine import combine
from fanfold.kernels.grouped.sm90.configs import config_for, pinned_config
from fanfold.kernels.grouped.sm90.items import single_items
from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
from fanfold.kernels.grouped.sm90.prepare import prepare_layer
from fanfold.layers.implementations import Adapters
from fanfold.layers.implementations.folding import products
from fanfold.routing.plan import plan_items
from fanfold.spec.activation import Activation
from fanfold.spec.weights import ExpertWeights


class GroupedInt4Sm90:
    """One token: gate_up with the activation, down, weighted sum. More: the plan and its work items before.

    Args:
        weights: the packed experts, on a Hopper GPU; not kept.
        activation: between gate_up and down.
        batch_invariant: one config for any number of rows.

    Raises:
        UnsupportedError: values that the product does not run, such as scales out of its range.
    """

    packed = None

    def __init__(self, weights: ExpertWeights, activation: Activation, batch_invariant: bool) -> None:
        self.gate_up, self.down = prepare_layer(weights)
        self.activation = activation
        self.batch_invariant = batch_invariant

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weights."""
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def hidden_order(self) -> Tensor | None:
        """See Implementation."""
        return self.gate_up.hidden_order

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapters: Adapters | None) -> Tensor:
        """See Implementation."""
        tokens, top_k = topk_ids.shape
        experts = self.down.num_experts
        sizes = self.gate_up, self.down, tokens, top_k
        first, second, chained = pinned_config(*sizes) if self.batch_invariant else config_for(*sizes)
        hidden, topk_ids = hidden.contiguous(), topk_ids.contiguous()
        with torch.cuda.device_of(hidden):
            if tokens == 1:
                route, work = None, single_items(topk_ids, experts)
            else:
                route, work = plan_items(topk_ids, experts, first.block_t)
            y2 = products(
                hidden,
                topk_ids,
                route,
                self.activation,
                adapters,
                lambda aside: grouped_gate_up(
                    hidden, self.gate_up, work, top_k, first, self.activation, chained=chained, aside=aside
                ),
                lambda h: grouped_down(h, self.down, work, second, chained=chained),
                chained=True,
            )
            return combine(y2, topk_ids, topk_weights, experts, dtype=hidden.dtype)
