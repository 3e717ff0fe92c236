"""The implementations of the expert layer, by the names that `select` gives them.

Each holds the layer's weights in its own form and runs a call from plan to weighted sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fanfold.spec.activation import Activation
from fanfold.spec.activation_format import ActivationFormat
from fanfold.spec.adapters import AdapterTable
from fanfold.spec.weights import ExpertWeights


@dataclass(frozen=True, eq=False)
class Adapters:
    """The adapters of a call.

    Attributes:
        gate_up, down: tables of the layer.
        ids: int32 [T], adapter slot of each token; < 0, and what is no slot's, is the base.
        unknown: int32 [1], counts tokens whose id is no slot's.
    """

    gate_up: AdapterTable
    down: AdapterTable
    ids: Tensor
    unknown: Tensor


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

    @property
    def hidden_order(self) -> Tensor | None:
        """int32 [E, I], where h's columns lie in another order: column j is output `hidden_order[e, j]` of gate_up."""
        ...

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapters: Adapters | None) -> Tensor:
        """The layer: hidden [T, H], ids and weights [T, k] -> [T, H] in hidden's dtype; arguments have been checked."""
        ...


def implement(
    name: str,
    weights: ExpertWeights,
    activation: Activation,
    batch_invariant: bool,
    activation_format: ActivationFormat,
) -> Implementation:
    """The implementation of that name for a layer.

    Args:
        name: of `select.choose`, but not "reference".
        weights: the packed experts, on the GPU. An implementation may keep another form of them.
        activation: between gate_up and down.
        batch_invariant: pin one config, so that a row's bits do not depend on the other rows.
        activation_format: what activations are rounded to before both products.

    Raises:
        UnsupportedError: the weights hold values that this implementation does not run.
    """
    if name == "grouped_int4_sm90":
        from fanfold.layers.implementations.grouped_int4_sm90 import GroupedInt4Sm90

        return GroupedInt4Sm90(weights, activation, batch_invariant, activation_format)
    from fanfold.layers.implementations.grouped import Grouped

    return Grouped.prepared(weights, activation, batch_invariant, activation_format)
