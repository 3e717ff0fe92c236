"""The layer with the Hopper product: 4-bit weights, repacked once at load."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fanfold.kernels.combine.combine import combine
from fanfold.kernels.grouped.sm90.configs import config_for, pinned_config
from fanfold.kernels.grouped.sm90.items import single_items
from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
from fanfold.kernels.grouped.sm90.prepare import prepare_layer
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.kernels.nvfp4.projection import input_scales
from fanfold.layers.implementations import Adapters
from fanfold.layers.implementations.folding import products
from fanfold.layers.implementations.operands import Nvfp4, Operands, Plain, by_row
from fanfold.routing.plan import plan_items
from fanfold.spec.activation import Activation
from fanfold.spec.activation_format import PLAIN, ActivationFormat
from fanfold.spec.adapters import Aside
from fanfold.spec.weights import ExpertWeights, ProjectionWeights


class GroupedInt4Sm90:
    """One token: gate_up with the activation, down, weighted sum. More: the plan and its work items before.

    Args:
        weights: the packed experts, on a Hopper GPU; not kept.
        activation: between gate_up and down.
        batch_invariant: one config for any number of rows.
        activation_format: what activations are rounded to before both products; nvfp4 for NVFP4 weights alone.

    Raises:
        UnsupportedError: values that the product does not run, such as scales out of its range.
    """

    packed = None

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        batch_invariant: bool,
        activation_format: ActivationFormat = PLAIN,
    ) -> None:
        self.gate_up, self.down = prepare_layer(weights)
        self.up_operands = _operands(weights.gate_up, self.gate_up, activation_format)
        self.down_operands = _operands(weights.down, self.down, activation_format)
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

            def gate_up(aside: Aside | None) -> Tensor:
                x, weights, shared = self.up_operands.of(hidden, topk_ids, top_k)
                aside = by_row(aside, shared)
                return grouped_gate_up(x, weights, work, shared, first, self.activation, chained=chained, aside=aside)

            def down(h: Tensor) -> Tensor:
                x, weights, _ = self.down_operands.of(h, topk_ids, 1, None if route is None else route.sorted_rows)
                return grouped_down(x, weights, work, second, chained=chained)

            y2 = products(hidden, topk_ids, route, self.activation, adapters, gate_up, down, chained=True)
            return combine(y2, topk_ids, topk_weights, experts, dtype=hidden.dtype)


def _operands(
    weights: ProjectionWeights, prepared: FragmentWeights, activation_format: ActivationFormat
) -> Operands[FragmentWeights]:
    if activation_format != "nvfp4":
        return Plain(prepared)
    return Nvfp4(prepared, input_scales(weights), _with_scales)


def _with_scales(weights: FragmentWeights, scales: Tensor) -> FragmentWeights:
    """The same codes, their global scales [E, P] times those [E] of the activations."""
    assert weights.global_scale is not None
    return replace(weights, global_scale=weights.global_scale * scales[:, None])
