"""The layer with the Hopper product: 4-bit weights, repacked once at load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fanfold.kernels.combine.combine import combine
from fanfold.kernels.common.device import gpu_name
from fanfold.kernels.common.tables import note_missing
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.configs import configs_of
from fanfold.kernels.grouped.sm90.items import single_items
from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
from fanfold.kernels.grouped.sm90.prepare import prepare_layer
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.kernels.nvfp4.projection import input_scales
from fanfold.layers.implementations import Adapters
from fanfold.layers.implementations.folding import products, single_row_products
from fanfold.layers.implementations.operands import Nvfp4, Operands, Plain, by_row
from fanfold.routing.plan import plan_items
from fanfold.spec.activation import Activation
from fanfold.spec.activation_format import PLAIN, ActivationFormat
from fanfold.spec.adapters import Aside, Expand
from fanfold.spec.weights import ExpertWeights, ProjectionWeights


class GroupedInt4Sm90:
    """One token: gate_up with the activation, down, weighted sum. More: the plan and its work items before.

    Args:
        weights: the packed experts, on a Hopper GPU; not kept.
        activation: between gate_up and down.
        batch_invariant: one config for any number of rows.
        activation_format: what activations are rounded to before both products; nvfp4 for NVFP4 weights alone.

    Attributes:
        forced: configs of both products, and whether launches are chained, that are being tried; None: the tables'.

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
        self.gpu = gpu_name(self.down.words.device)
        self.forced: tuple[Sm90Config, Sm90Config, bool] | None = None

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
        first, second, chained = self.forced or self._configs(tokens, top_k)
        hidden, topk_ids = hidden.contiguous(), topk_ids.contiguous()
        with torch.cuda.device_of(hidden):
            if tokens == 1:
                route, work = None, single_items(topk_ids, experts)
            else:
                route, work = plan_items(topk_ids, experts, first.block_t)

            def gate_up(aside: Aside | None = None, expand: Expand | None = None) -> Tensor:
                x, weights, shared = up
                aside = by_row(aside, shared)
                return grouped_gate_up(x, weights, work, shared, first, self.activation, chained, aside, expand)

            def down(h: Tensor) -> Callable[[Expand | None], Tensor]:
                x, weights, _ = self.down_operands.of(h, topk_ids, 1, None if route is None else route.sorted_rows)
                return lambda expand: grouped_down(x, weights, work, second, chained, expand)

            def fold_gate_up(expand: Expand) -> Tensor:
                return gate_up(expand=expand)

            def plain_down(h: Tensor) -> Tensor:
                return down(h)(None)

            up = self.up_operands.of(hidden, topk_ids, top_k)
            if adapters is not None and route is None:
                one_part = second.parts == 1
                y2 = single_row_products(
                    hidden, topk_ids, adapters, fold_gate_up, down, one_part=one_part, chained=chained
                )
            else:
                y2 = products(hidden, topk_ids, route, self.activation, adapters, gate_up, plain_down, chained=True)
            return combine(y2, topk_ids, topk_weights, experts, dtype=hidden.dtype)

    def _configs(self, tokens: int, top_k: int) -> tuple[Sm90Config, Sm90Config, bool]:
        found = configs_of(self.gate_up, self.down, tokens, top_k, self.batch_invariant, self.gpu)
        if not found.same and not self.batch_invariant:
            layer = self.gate_up.num_experts, top_k, self.gate_up.k, self.gate_up.n
            note_missing(self.gpu, self.gate_up.format.name, layer, "configs are those of the nearest layer")
        return found.gate_up, found.down, found.chained


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
