"""NVFP4 activations before the weights of a packed projection: whose global scales they take, and the product in torch.

Torch alone, so that the reference and the kernels take their scales from one place.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fanfold.kernels.nvfp4 import reference
from fanfold.kernels.nvfp4.run import experts_of_rows, global_scales
from fanfold.spec.weights import ProjectionWeights


def input_scales(weights: ProjectionWeights) -> Tensor:
    """The checkpoint's global scale of each expert's activations, fp32 [E], as a multiplier; halves share the larger.

    0 where the file has none, or one that is not finite and positive: such experts' scale is made at each call.
    """
    stored = weights.tensors.get("input_scale")
    if stored is None:
        return weights.tensors["global_scale"].new_zeros(weights.num_experts)
    scales = torch.reciprocal(stored) if weights.format.divisor else stored
    return torch.where(torch.isfinite(scales) & (scales > 0), scales, 0.0).amax(1)


def with_alphas(weights: ProjectionWeights, scales: Tensor) -> ProjectionWeights:
    """The projection as a product of activations without their global scale needs it.

    Args:
        weights: NVFP4.
        scales: fp32 [E], the global scale of each expert's activations.

    Returns:
        The same codes and scales; global scales fp32 [E, P] are multipliers, those of the file times `scales`.
    """
    stored = weights.tensors["global_scale"]
    multiplier = torch.reciprocal(stored) if weights.format.divisor else stored
    tensors = {**weights.tensors, "global_scale": multiplier * scales[:, None]}
    return replace(weights, format=replace(weights.format, divisor=False), tensors=tensors)


def product(x: Tensor, weights: ProjectionWeights, expert_offsets: Tensor) -> Tensor:
    """Both operands in NVFP4 (semantics, section 4): packing with two levels of scales, then the exact product.

    Args:
        x: [R, K] in bf16, fp16 or fp32, rows in expert order; expert e owns [expert_offsets[e], expert_offsets[e+1]).
        weights: NVFP4, [E, P, ...].
        expert_offsets: int32 [E+1].

    Returns:
        fp32 [R, P*N], the halves side by side, not rounded yet; rows of no expert are 0.
    """
    if not len(x):
        return x.new_empty((0, weights.halves * weights.n), dtype=torch.float32)
    expert, inside = experts_of_rows(expert_offsets, len(x))
    given = input_scales(weights)
    scales = global_scales(x, None, expert, inside, given, torch.ones_like(given, dtype=torch.bool))
    rows = reference.pack_rows(x, torch.where(inside, scales[expert], 1.0))
    tensors = with_alphas(weights, scales).tensors
    halves: list[Tensor] = []
    for p in range(weights.halves):
        matrices = list(zip(tensors["packed"][:, p], tensors["scale"][:, p], strict=True))
        out = torch.zeros((len(x), weights.n), device=x.device)
        reference.product(*rows, None, expert_offsets, matrices, tensors["global_scale"][:, p], out)
        if weights.bias is not None:
            out += torch.where(inside[:, None], weights.bias[expert, p].float(), 0.0)
        halves.append(out)
    return torch.cat(halves, dim=1)
