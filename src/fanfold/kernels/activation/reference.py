"""Activations in readable torch (semantics: the layer, step 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fanfold.spec.activation import Activation


def activate(y1: Tensor, activation: Activation) -> Tensor:
    """The input of down from the rounded output of gate_up, computed in fp32.

    Args:
        y1: [R, 2*I], gate in the first half of the columns and up in the second; [R, I] for relu2.
        activation: which, with its constants.

    Returns:
        [R, I] in y1's dtype.
    """
    if activation.kind == "relu2":
        return torch.relu(y1.float()).square().to(y1.dtype)
    gate, up = y1.float().chunk(2, dim=-1)
    if activation.kind == "silu":
        h = silu(gate) * up
    elif activation.kind == "gelu_tanh":
        h = gelu(gate, approximate="tanh") * up
    else:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        h = (up + 1.0) * (gate * torch.sigmoid(activation.alpha * gate))
    return h.to(y1.dtype)
