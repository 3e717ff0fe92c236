"""Activation: what happens between gate_up and down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fanfold.errors import UnsupportedError

ActivationKind = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
KINDS: tuple[ActivationKind, ...] = ("silu", "gelu_tanh", "clamped_swiglu", "relu2")


@dataclass(frozen=True)
class Activation:
    """The activation of an expert.

    Attributes:
        kind: `silu`: silu(gate) * up. `gelu_tanh`: gelu(gate, tanh form) * up. `clamped_swiglu` (gpt-oss):
            g = min(gate, limit), u = clamp(up, -limit, limit), (u + 1) * g * sigmoid(alpha * g).
            `relu2`: relu(up)^2, without a gate.
        alpha: slope of the sigmoid of clamped_swiglu.
        limit: bound of clamped_swiglu.
    """

    kind: ActivationKind = "silu"
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedError(
                "activation",
                found=repr(self.kind),
                expected=f"one of {', '.join(KINDS)}",
                next_step="Experts with another activation are not run yet.",
            )

    @property
    def gated(self) -> bool:
        """Whether the expert has a gate projection beside up."""
        return self.kind != "relu2"
