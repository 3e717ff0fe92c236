"""The implementations of the expert layer, by the names that `select` gives them.

Each holds the layer's weights in its own form and runs a call from plan to weighted sum.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fanfold.spec.activation import Activation
from fanfold.spec.weights import ExpertWeights


class Implementation(Protocol):
    """What runs a layer."""

    @property
    def packed(self) -> ExpertWeights | None:
        """The weights as they lie on disk; None where it keeps another form of them."""
        ...

    @property
    def nbytes(self) -> int:
        """Resident bytes of the weights."""
        ...

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The layer: hidden [T, H], ids and weights [T, k] -> [T, H] in hidden's dtype; arguments have been checked."""
        ...


def implement(name: str, weights: ExpertWeights, activation: Activation, batch_invariant: bool) -> Implementation:
    """The implementation of that name for a layer.

    Args:
        name: of `select.choose`, but not "reference".
        weights: the packed experts, on the GPU. An implementation may keep another form of them.
        activation: between gate_up and down.
        batch_invariant: pin one config, so that a row's bits do not depend on the other rows.

    Raises:
        UnsupportedError: the weights hold values that this implementation does not run.
    """
    if name == "grouped_int4_sm90":
        from fanfold.layers.implementations.grouped_int4_sm90 import GroupedInt4Sm90

        return GroupedInt4Sm90(weights, activation, batch_invariant)
    from fanfold.layers.implementations.grouped import Grouped

    return Grouped.prepared(weights, activation, batch_invariant)
