"""LayerJob: what an implementation of the expert layer is chosen for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fanfold.spec.activation import ActivationKind
from fanfold.spec.activation_format import PLAIN, ActivationFormat
from fanfold.spec.shape import ExpertShape
from fanfold.spec.weight_format import WeightFormat


@dataclass(frozen=True)
class LayerJob:
    """One expert layer, as far as the choice depends on it.

    Attributes:
        shape: sizes.
        gate_up, down: how the weights are packed.
        activation: kind of the activation.
        dtype: of the activations.
        activation_format: what they are rounded to before each product.
    """

    shape: ExpertShape
    gate_up: WeightFormat
    down: WeightFormat
    activation: ActivationKind
    dtype: torch.dtype
    activation_format: ActivationFormat = PLAIN
