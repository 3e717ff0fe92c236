"""torch.ops.fanfold.experts: a whole layer as one operation.

One operation a layer costs the host least, and a compiler has nothing to look into. The layer is handed over by a
number: its weights, adapters and configs are its own and no inputs of a graph.
"""

from __future__ import annotations

import itertools
from typing import Protocol
from weakref import WeakValueDictionary

from torch import Tensor

from fanfold.ops.op import Op, register


class Layer(Protocol):
    """What the operation calls."""

    def run(
        self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None, /
    ) -> Tensor:
        """The layer's result, [T, H]."""
        ...


_LAYERS: WeakValueDictionary[int, Layer] = WeakValueDictionary()
_NUMBERS = itertools.count()


def number_of(layer: Layer) -> int:
    """A new number for a layer, valid as long as the layer lives."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def _run(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None, layer: int) -> Tensor:
    return _LAYERS[layer].run(hidden, topk_ids, topk_weights, adapter_ids)


def _fake(hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, adapter_ids: Tensor | None, layer: int) -> Tensor:
    return hidden.new_empty(hidden.shape)


EXPERTS = Op(
    "(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor? adapter_ids, int layer) -> Tensor", _run, _run, _fake
)
register("experts", EXPERTS)
