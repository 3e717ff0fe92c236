"""Activations in fp32 (device functions). A NaN stays one: on a GPU plain maximum and minimum would drop it."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, alpha, limit, KIND: tl.constexpr):
    """The input of down from rounded outputs of gate and up, in fp32; relu2 reads `up` alone."""
    up = up.to(tl.float32)
    if KIND == "relu2":
        up = tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return up * up
    else:
        gate = gate.to(tl.float32)
        if KIND == "silu":
            return gate * tl.sigmoid(gate) * up
        elif KIND == "gelu_tanh":
            # (1 + tanh u) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (gate + 0.044715 gate^3)
            # One rounding less, and said so: the bits must not depend on whether a launch lets the compiler choose.
            twice = 1.5957691216057308 * tl.fma(0.044715 * gate * gate, gate, gate)
            return gate * tl.sigmoid(twice) * up
        else:
            tl.static_assert(KIND == "clamped_swiglu")
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
            return (up + 1.0) * (gate * tl.sigmoid(alpha * gate))
