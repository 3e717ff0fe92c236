"""One expert layer in readable torch: the oracle of every kernel.

What it computes, to the rounding, is docs/semantics.md; the steps are numbered as there. Batch-invariant by
construction: a row's bits depend on that row, its experts and its adapter alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.activation.reference import activate
from fanfold.kernels.combine.reference import combine
from fanfold.kernels.grouped.reference import dequantize_rows, grouped, quantize_rows
from fanfold.kernels.lora.reference import lora_fold
from fanfold.kernels.nvfp4.projection import product as nvfp4_product
from fanfold.routing.reference import plan_sort
from fanfold.spec.activation import Activation
from fanfold.spec.activation_format import PLAIN, ActivationFormat
from fanfold.spec.lora import LoraPair
from fanfold.spec.route import Route
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

# projection ("gate", "up", "down") -> (slot, expert) -> pair
LayerPairs = Mapping[str, Mapping[tuple[int, int], LoraPair]]


def layer(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    pairs: LayerPairs | None = None,
    adapter_ids: Tensor | None = None,
    activation_format: ActivationFormat = PLAIN,
) -> Tensor:
    """The weighted sum over each token's experts.

    Args:
        x: [T, H] in bf16, fp16 or fp32.
        topk_ids: integers [T, k]; an id outside [0, E) is an expert of another rank and adds nothing.
        topk_weights: [T, k].
        weights: the packed experts; dequantised in fp32, one expert at a time.
        activation: between gate_up and down.
        pairs: the LoRA pairs of all slots.
        adapter_ids: int [T], slot of each token; < 0 is the base. None: base for all.
        activation_format: what activations are rounded to before both products.

    Returns:
        [T, H] in x's dtype.
    """
    experts, top_k, halves = weights.shape.num_experts, topk_ids.shape[1], weights.gate_up.halves
    route = plan_sort(topk_ids, experts)  # 2
    tokens = (route.sorted_rows // max(top_k, 1)).long()
    lora = None if pairs is None or adapter_ids is None else (pairs, adapter_ids[tokens], _experts(route))

    y1 = _product(x[tokens], weights.gate_up, route, activation_format)  # 3
    if lora is not None:
        for half, name in enumerate(("gate", "up") if halves == 2 else ("up",)):
            columns = y1[:, half * weights.gate_up.n : (half + 1) * weights.gate_up.n]
            lora_fold(columns, x[tokens], lora[0].get(name, {}), lora[1], lora[2])

    h = activate(y1, activation)  # 4

    y2 = _product(h, weights.down, route, activation_format)  # 5
    if lora is not None:
        lora_fold(y2, h, lora[0].get("down", {}), lora[1], lora[2])

    return combine(y2[route.positions.long()], topk_ids, topk_weights, experts)  # 6


def _product(x: Tensor, projection: ProjectionWeights, route: Route, activation_format: ActivationFormat) -> Tensor:
    """[R, P*N]: the halves of one projection side by side."""
    dtype = x.dtype
    if activation_format == "nvfp4":
        return nvfp4_product(x, projection, route.expert_offsets).to(dtype)
    if activation_format == "fp8":
        group = projection.format.activation_group(projection.k)
        x = dequantize_rows(*quantize_rows(x, group), group)  # fp32: what is multiplied

    def half(p: int) -> Tensor:
        bias = None if projection.bias is None else projection.bias[:, p]
        return grouped(x, lambda e: dequantize_expert(projection, e, p), route.expert_offsets, projection.n, bias)

    return torch.cat([half(p) for p in range(projection.halves)], dim=1).to(dtype)


def _experts(route: Route) -> Tensor:
    """The expert of each sorted position; E behind the last offset."""
    places = torch.arange(len(route.sorted_rows), device=route.sorted_rows.device)
    return torch.searchsorted(route.expert_offsets[1:].contiguous(), places, right=True)
