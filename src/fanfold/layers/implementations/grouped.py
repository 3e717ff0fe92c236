"""The layer with the portable product: every format, weights as they lie on disk."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.combine.combine import combine
from fanfold.kernels.common.device import CHAINS, arch_of, gpu_name
from fanfold.kernels.common.tables import note_missing
from fanfold.kernels.grouped.act_order import sort_by_group
from fanfold.kernels.grouped.launch import grouped_down, grouped_gate_up
from fanfold.kernels.grouped.rows import gather_down, gather_gate_up
from fanfold.kernels.grouped.tuned import INSTEAD, layer_configs
from fanfold.kernels.nvfp4.projection import input_scales, with_alphas
from fanfold.layers.implementations import Adapters
from fanfold.layers.implementations.folding import products
from fanfold.layers.implementations.operands import Nvfp4, Operands, Plain, by_row
from fanfold.routing.plan import plan_sort
from fanfold.spec.activation import Activation
from fanfold.spec.activation_format import PLAIN, ActivationFormat
from fanfold.spec.adapters import Aside
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

LOG = logging.getLogger("fanfold")


class Grouped:
    """One token: gate_up with the activation, down, weighted sum. More: the plan before (two launches for many rows).

    Args:
        weights: the packed experts, on the GPU.
        activation: between gate_up and down.
        batch_invariant: one config for any number of rows.
        activation_format: what activations are rounded to before both products.
        gate_up_order, down_order: int32 [E, K] of weights that `sort_by_group` made.

    Attributes:
        forced: configs of both products that are being tried; None: those of the tables.
    """

    hidden_order = None

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        batch_invariant: bool = False,
        activation_format: ActivationFormat = PLAIN,
        gate_up_order: Tensor | None = None,
        down_order: Tensor | None = None,
    ) -> None:
        self.weights = weights
        self.activation = activation
        self.batch_invariant = batch_invariant
        self.w8a8 = activation_format == "fp8"
        self.gate_up = _operands(weights.gate_up, activation_format)
        self.down = _operands(weights.down, activation_format)
        self.gate_up_order = gate_up_order
        self.down_order = down_order
        device = next(iter(weights.down.tensors.values())).device
        self.arch = arch_of(device)
        self.gpu = gpu_name(device)
        self.forced: tuple[LaunchConfig, LaunchConfig] | None = None

    @classmethod
    def prepared(
        cls,
        weights: ExpertWeights,
        activation: Activation,
        batch_invariant: bool,
        activation_format: ActivationFormat,
    ) -> Grouped:
        """The layer with act-order sorted by group, once; it keeps the sorted weights alone."""
        gate_up, gate_up_order = _sorted(weights.gate_up)
        down, down_order = _sorted(weights.down)
        made = ExpertWeights(gate_up, down)
        return cls(made, activation, batch_invariant, activation_format, gate_up_order, down_order)

    @property
    def packed(self) -> ExpertWeights | None:
        """The weights as they lie on disk; None where they have been sorted."""
        return self.weights if self.gate_up_order is None and self.down_order is None else None

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weights."""
        orders = [order.nbytes for order in (self.gate_up_order, self.down_order) if order is not None]
        return self.weights.nbytes + sum(orders)

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapters: Adapters | None = None) -> Tensor:
        """See Implementation."""
        weights = self.weights
        experts, (tokens, top_k) = weights.shape.num_experts, topk_ids.shape
        topk_ids = topk_ids.contiguous()
        first, second = self.forced or self._configs(hidden.dtype, tokens, top_k)
        up_options: Any = {"activation": self.activation, "permutation": self.gate_up_order, "w8a8": self.w8a8}
        down_options: Any = {"permutation": self.down_order, "w8a8": self.w8a8}
        with torch.cuda.device_of(hidden):
            route, work = (None, None) if tokens == 1 else plan_sort(topk_ids, experts, first.block_t)
            order = None if route is None else route.sorted_rows

            def gate_up(aside: Aside | None) -> Tensor:
                x, packed, shared = self.gate_up.of(hidden, topk_ids, top_k)
                aside = by_row(aside, shared)
                if work is None or order is None:
                    return gather_gate_up(x, packed, topk_ids.view(-1, shared), first, aside=aside, **up_options)
                return grouped_gate_up(x, packed, work, order, shared, first, aside=aside, **up_options)

            def down(h: Tensor) -> Tensor:
                x, packed, _ = self.down.of(h, topk_ids, 1, order)
                if work is None or order is None:
                    return gather_down(x, packed, topk_ids, second, **down_options)
                return grouped_down(x, packed, work, order, second, scatter=True, **down_options)

            y2 = products(
                hidden, topk_ids, route, self.activation, adapters, gate_up, down, chained=self.arch >= CHAINS
            )
            return combine(y2, topk_ids, topk_weights, experts)

    def _configs(self, dtype: torch.dtype, tokens: int, top_k: int) -> tuple[LaunchConfig, LaunchConfig]:
        shape, pinned = self.weights.shape, self.batch_invariant
        formats = self.weights.gate_up.format, self.weights.down.format
        options = self.arch, tokens, top_k, self.w8a8, pinned, self.gpu
        found = layer_configs(*formats, shape, dtype, *options)
        if found.row is None and not pinned:
            layer = shape.num_experts, top_k, shape.hidden, shape.intermediate
            note_missing(self.gpu, formats[0].name, layer, INSTEAD)
        return found.gate_up, found.down


def _operands(weights: ProjectionWeights, activation_format: ActivationFormat) -> Operands[ProjectionWeights]:
    if activation_format == "nvfp4":
        return Nvfp4(weights, input_scales(weights), with_alphas)
    return Plain(weights)  # the launch makes the numbers of 8 bits


def _sorted(weights: ProjectionWeights) -> tuple[ProjectionWeights, Tensor | None]:
    """Weights and order, where their groups can be sorted; else as they are."""
    if not weights.format.act_order:
        return weights, None
    try:
        return sort_by_group(weights)
    except ArgumentError as error:  # the product then looks up the scale of each input
        LOG.info("act-order runs as it lies on disk, about three times slower: found %s", error.found)
        return weights, None
