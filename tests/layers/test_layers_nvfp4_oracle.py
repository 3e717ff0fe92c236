"""Layers with activations in NVFP4 against compressed-tensors' own rounding."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from fanfold import load_experts
from fanfold.formats.codec import dequantize_expert
from nvfp4_oracle import DenseExperts
from samples import numbers, relative_error, sample


@pytest.mark.parametrize("name", ["ct_qwen3moe_nvfp4", "nvfp4", "modelopt_qwen3moe_nvfp4"])
def test_c1_c4_c9_experts_run_as_compressed_tensors_rounds_them(name: str) -> None:
    """Its own fake quantisation around dense products, one expert at a time, with the scales of the file."""
    experts = load_experts(sample(name), dtype=torch.float32)
    assert experts.activation_format == "nvfp4"
    up, down = experts.weights.gate_up, experts.weights.down
    dense = DenseExperts(experts.weights)
    x = numbers(24, experts.shape.hidden)
    sure = torch.ones(24, 1)
    for e in range(0, experts.shape.num_experts, 3):
        w = [dequantize_expert(up, e, 0), dequantize_expert(up, e, 1), dequantize_expert(down, e, 0)]
        expected = dense.expert(e, x)
        found = experts(x, torch.full((24, 1), e), sure)
        plain = (silu(x @ w[0].T) * (x @ w[1].T)) @ w[2].T
        # Their products with a scale and ours with its reciprocal differ by a bit, so that a few codes fall otherwise.
        assert relative_error(found, expected) < 0.01, e
        assert abs(float(found.norm() / expected.norm()) - 1) < 1e-3
        assert 0.05 < relative_error(plain, expected) < 0.4
