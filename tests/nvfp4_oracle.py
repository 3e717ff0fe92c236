"""Experts with activations in NVFP4 as compressed-tensors runs them: its fake quantisation around dense products."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor, nn
from torch.nn.functional import silu

from fanfold.formats.codec import dequantize_expert
from fanfold.spec import ExpertWeights, ProjectionWeights

ARGS = QuantizationArgs(
    num_bits=4,
    type="float",  # pyright: ignore[reportArgumentType]
    strategy="tensor_group",  # pyright: ignore[reportArgumentType]
    group_size=16,
    dynamic="local",  # pyright: ignore[reportArgumentType]
    scale_dtype=torch.float8_e4m3fn,
)


def theirs(x: Tensor, divisor: Tensor) -> Tensor:
    """compressed-tensors' rounding of activations, in the dtype of x."""
    scale, zero = compute_dynamic_scales_and_zp(x, ARGS, torch.nn.Module(), divisor.reshape(1))
    return fake_quantize(x, scale, zero, ARGS, global_scale=divisor.reshape(1))


def divisors(projection: ProjectionWeights) -> Tensor:
    """What its quantiser divides by, [E], of the file's input scales."""
    stored = projection.tensors["input_scale"][:, 0]
    return stored if projection.format.divisor else 1 / stored


class DenseExperts(nn.Module):
    """The experts of a layer, dequantised; SiLU."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        up, down = weights.gate_up, weights.down
        self.matrices = [
            (dequantize_expert(up, e, 0), dequantize_expert(up, e, 1), dequantize_expert(down, e, 0))
            for e in range(up.num_experts)
        ]
        self.up, self.down = divisors(up), divisors(down)

    def expert(self, e: int, x: Tensor) -> Tensor:
        """Rows of one expert."""
        gate, up, down = self.matrices[e]
        rounded = theirs(x, self.up[e])
        h = silu(rounded @ gate.T) * (rounded @ up.T)
        return theirs(h, self.down[e]) @ down.T

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, *_: Any) -> Tensor:
        """The layer, [T, H]."""
        out = torch.zeros_like(x)
        for e in range(len(self.matrices)):
            token, slot = (ids == e).nonzero(as_tuple=True)
            if len(token):
                out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None].to(x.dtype))
        return out
