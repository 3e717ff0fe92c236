"""A whole layer as one operation: it costs the host least, and a compiler has nothing to look into.

torch.ops.fanfold.experts runs a `fanfold.Experts`, handed over by a number: its weights, adapters and configs are its
own and no inputs of a graph; fold_linear folds the adapters of a plain module in the same way.
torch.ops.fanfold.packed_layer takes weights as they lie on disk.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fanfold.layers.reference import layer as reference_layer
from fanfold.ops.failures import named
from fanfold.ops.op import Op, register
from fanfold.ops.packed import packed, projection_of, schema
from fanfold.ops.rows import activation_named
from fanfold.spec.activation import Activation
from fanfold.spec.weights import ExpertWeights


class Layer(Protocol):
    """What the operation calls."""

    @property
    def path(self) -> str:
        """The layer's name in its model."""
        ...

    @property
    def implementation(self) -> str:
        """The name of the one that runs."""
        ...

    def run(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None, /) -> Tensor:
        """The layer's result, [T, H]."""
        ...


class LinearLayer(Protocol):
    """A plain module with adapters."""

    def run_fold(self, x: Tensor, y: Tensor, adapter_ids: Tensor, /) -> Tensor:
        """The output with each row's change folded in, in memory of its own."""
        ...


_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NUMBERS = itertools.count()


def number_of(layer: Layer | LinearLayer) -> int:
    """A new number for a layer, valid as long as the layer lives."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def _fold(x: Tensor, y: Tensor, adapter_ids: Tensor, layer: int) -> Tensor:
    return _LAYERS[layer].run_fold(x, y, adapter_ids)


def _fold_fake(x: Tensor, y: Tensor, adapter_ids: Tensor, layer: int) -> Tensor:
    return y.new_empty(y.shape)


def _run(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None, layer: int) -> Tensor:
    found = _LAYERS[layer]
    try:
        return found.run(hidden, topk_ids, topk_weights, adapter_ids)
    except Exception as error:
        failure = named(error, f"{found.path}, {found.implementation} on {hidden.device}")
        if failure is None:
            raise
        raise failure from error


def _fake(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None, layer: int) -> Tensor:
    return hidden.new_empty(hidden.shape)


def packed_layer(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """torch.ops.fanfold.packed_layer: one layer of weights as they lie on disk.

    Args:
        hidden: [T, H], bf16, fp16 or fp32.
        topk_ids: int32 or int64 [T, k]; an id outside [0, E) adds nothing.
        topk_weights: [T, k].
        weights: on hidden's device.
        activation: between gate_up and down.

    Returns:
        [T, H] in hidden's dtype.
    """
    kind = activation.kind, activation.alpha, activation.limit
    return torch.ops.fanfold.packed_layer(
        hidden, topk_ids, topk_weights, *kind, *packed(weights.gate_up), *packed(weights.down)
    )


def _packed(
    hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, kind: str, alpha: float, limit: float, *both: Any
) -> Tensor:
    activation = activation_named(kind, alpha, limit)
    weights = ExpertWeights(projection_of(*both[:6]), projection_of(*both[6:]))
    if hidden.device.type == "cpu":
        return reference_layer(hidden, topk_ids, topk_weights, weights, activation)
    from fanfold.layers.implementations.grouped import Grouped

    return Grouped(weights, activation).run(hidden, topk_ids, topk_weights)


def _packed_fake(hidden: Tensor, *others: Any) -> Tensor:
    return hidden.new_empty(hidden.shape)


OPS = {
    "experts": Op(
        "(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor? adapter_ids, int layer) -> Tensor",
        _run,
        _run,
        _fake,
    ),
    "fold_linear": Op("(Tensor x, Tensor y, Tensor adapter_ids, int layer) -> Tensor", _fold, _fold, _fold_fake),
    "packed_layer": Op(
        "(Tensor hidden, Tensor topk_ids, Tensor topk_weights, str kind, float alpha, float limit, "
        f"{schema('gate_up_')}, {schema('down_')}) -> Tensor",
        _packed,
        _packed,
        _packed_fake,
    ),
}
for _name, _op in OPS.items():
    register(_name, _op)
