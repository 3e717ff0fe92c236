"""Activations: values by hand, fp32 inside, one rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fanfold.kernels.activation.reference import activate
from fanfold.spec import Activation
from samples import numbers


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swiglu(gate: float, up: float, alpha: float = 1.702, limit: float = 7.0) -> float:
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return (up + 1) * gate * sigmoid(alpha * gate)


PAIRS = [(1.0, 2.0), (-1.5, 0.5), (0.0, 3.0), (8.0, -9.0), (-20.0, 9.0), (7.0, 7.0)]
BY_HAND = {
    "silu": (Activation("silu"), lambda g, u: g * sigmoid(g) * u),
    "gelu_tanh": (Activation("gelu_tanh"), lambda g, u: gelu_tanh(g) * u),
    "clamped_swiglu": (Activation("clamped_swiglu"), swiglu),
    "other alpha and limit": (
        Activation("clamped_swiglu", alpha=1.0, limit=1.2),
        lambda g, u: swiglu(g, u, alpha=1.0, limit=1.2),
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_gated_values(case: str) -> None:
    activation, by_hand = BY_HAND[case]
    y1 = torch.tensor([[g for g, _ in PAIRS] + [u for _, u in PAIRS]])
    expected = torch.tensor([[by_hand(g, u) for g, u in PAIRS]])
    torch.testing.assert_close(activate(y1, activation), expected, rtol=1e-6, atol=1e-6)


def test_relu2_has_no_gate() -> None:
    y1 = torch.tensor([[-2.0, 0.0, 1.5, 3.0]])
    assert activate(y1, Activation("relu2")).tolist() == [[0.0, 0.0, 2.25, 9.0]]


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_inside_and_one_rounding(kind: str, dtype: torch.dtype) -> None:
    activation = Activation(kind)
    y1 = 3 * numbers(17, 64, dtype=dtype)
    found = activate(y1, activation)
    assert found.dtype == dtype
    assert torch.equal(found, activate(y1.float(), activation).to(dtype))


@pytest.mark.parametrize("y1", [torch.empty(0, 8), torch.empty(3, 0)])
def test_nothing_to_do(y1: Tensor) -> None:
    assert activate(y1, Activation()).shape == (y1.shape[0], y1.shape[1] // 2)
