"""Models: what is timed, each with fanfold's experts or with transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from fanfold.formats.checkpoint import Checkpoint
from fanfold.integrations.transformers.forward import Forward, ModelForward
from fanfold.integrations.transformers.interface import KINDS, plain_model
from fanfold.integrations.transformers.model import load_model
from fanfold.integrations.transformers.synthetic import SyntheticModel, synthetic_model
from fanfold.layers.experts import Experts as ExpertLayer
from fanfold.spec.weight_format import WeightFormat
from fanfold.throughput.pace import Experts

Adapters = Mapping[str, str | Path]
Using = Callable[[Sequence[str | None]], AbstractContextManager[object]]


@dataclass(frozen=True)
class Loaded:
    """A model on its device.

    Attributes:
        forward: what is called.
        device: where it is.
        vocabulary: how many tokens it knows.
        weights: of the experts, as they run.
        using: a block in which each row of the batch has the adapter of that name, or None: the base.
    """

    forward: Forward
    device: torch.device
    vocabulary: int
    weights: str
    using: Using


class Models(Protocol):
    """One model, to be loaded with several experts."""

    @property
    def name(self) -> str:
        """The folder, or the name."""
        ...

    @property
    def layers(self) -> int | None:
        """Of random weights; None: a checkpoint, all of it."""
        ...

    def refusal(self, experts: Experts) -> str | None:
        """Why these experts don't run it; None where they do."""
        ...

    def load(self, experts: Experts, adapters: Adapters) -> Loaded:
        """The model with them."""
        ...


@dataclass(frozen=True)
class CheckpointModels:
    """A checkpoint; transformers' own experts run plain weights alone, as it loads most packed ones wrong."""

    path: str | Path
    device: torch.device
    dtype: torch.dtype
    layers: None = field(default=None, init=False)

    @property
    def name(self) -> str:
        """The folder."""
        return str(self.path)

    def refusal(self, experts: Experts) -> str | None:
        """See Models."""
        packed = Checkpoint(self.path).quantization.method
        return None if packed is None or experts == "fanfold" else f"transformers has no experts for {packed} weights"

    def load(self, experts: Experts, adapters: Adapters) -> Loaded:
        """See Models."""
        if experts == "fanfold":
            return with_adapters(load_model(self.path, device=self.device.type, dtype=self.dtype), adapters)
        return with_peft(plain_model(self.path, experts, self.dtype).to(self.device), adapters)


@dataclass(frozen=True)
class RandomModels:
    """A model of random weights: packed for fanfold, for transformers' own experts the same dequantised."""

    name: str
    model: SyntheticModel
    layers: int
    format: WeightFormat
    device: torch.device
    dtype: torch.dtype

    def refusal(self, experts: Experts) -> str | None:
        """See Models."""
        return None

    def load(self, experts: Experts, adapters: Adapters) -> Loaded:
        """See Models."""
        made = synthetic_model(self.model, self.layers, self.format, experts, self.device, self.dtype)
        return with_adapters(made, adapters) if experts == "fanfold" else with_peft(made, adapters)


def with_adapters(model: Any, adapters: Adapters) -> Loaded:
    """A model with fanfold's experts and a pool."""
    for name, folder in adapters.items():
        model.adapters.load(name, folder)
    layers = [module for module in cast("nn.Module", model).modules() if isinstance(module, ExpertLayer)]
    weights = ", ".join(dict.fromkeys(fmt.name for layer in layers for fmt in layer.formats))
    using = model.adapters.using if adapters else _base
    return Loaded(ModelForward(model), model.device, model.config.vocab_size, weights, using)


def with_peft(model: Any, adapters: Adapters) -> Loaded:
    """A model with transformers' own experts; adapters by PEFT."""
    weights = KINDS[model.dtype]
    device, vocabulary = model.device, model.config.vocab_size
    if not adapters:
        return Loaded(ModelForward(model), device, vocabulary, weights, _base)
    from fanfold.integrations.transformers.by_adapter import ByAdapter

    forward = ByAdapter(model, adapters)
    return Loaded(forward, device, vocabulary, weights, forward.using)


def _base(rows: Sequence[str | None]) -> AbstractContextManager[object]:
    return nullcontext()
