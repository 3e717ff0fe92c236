"""Site: a place of a model where adapters go.

The layers own them; a host of another model writes its own. Attributes are plain ones or properties.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fanfold.lora.adapter import Projection
from fanfold.spec import ExpertShape, LoraPair

ExpertPairs = Mapping[tuple[Projection, int], LoraPair]
"""(projection, expert) -> pair; experts and projections that an adapter leaves alone are not in it."""

Pairs = ExpertPairs | LoraPair
"""What one site gets: an ExpertSite's pairs, or a LinearSite's one pair."""


@runtime_checkable
class Site(Protocol):
    """What every site offers.

    `put` replaces all that the slot held here; `drop` empties the slot, and does nothing for an empty one.
    Pairs arrive as `convert` makes them, in the site's dtype and on its device; the site may keep them.
    """

    @property
    def path(self) -> str:
        """Path of the module in the model, e.g. `model.layers.0.mlp.experts`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations, which pairs are converted to."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the activations."""
        ...

    def reserve(self, slots: int, max_rank: int, /) -> None:
        """Makes room for a pool of so many slots and ranks; all slots are empty then."""
        ...

    def unknown_ids(self) -> int:
        """Tokens seen with an adapter id that is no slot's, since `reserve`."""
        ...

    def put(self, slot: int, pairs: Any, /) -> None:
        """Fills a slot."""
        ...

    def drop(self, slot: int, /) -> None:
        """Empties a slot."""
        ...


@runtime_checkable
class ExpertSite(Site, Protocol):
    """The experts of one layer."""

    @property
    def shape(self) -> ExpertShape:
        """The layer's sizes."""
        ...

    @property
    def interleaved(self) -> bool:
        """Whether gate_up outputs lie g0, u0, g1, u1, ... (gpt-oss) instead of all gates, then all ups."""
        ...

    @property
    def transposed(self) -> bool:
        """Whether the model's stacked parameters are (E, in, out) (gpt-oss) instead of (E, out, in)."""
        ...

    def put(self, slot: int, pairs: ExpertPairs, /) -> None:
        """Fills a slot. Gate and up [I, H], down [H, I]; a gate and an up pair may share one A."""
        ...


@runtime_checkable
class OrderedSite(Protocol):
    """Experts that may make h in an order of their own, for weights that were sorted when they were loaded."""

    @property
    def hidden_order(self) -> Tensor | None:
        """int32 [E, I]: column j of expert e's h is output `hidden_order[e, j]` of gate and up; None: j."""
        ...


@runtime_checkable
class PartialSite(Protocol):
    """Experts of a layer some of which are in another process, which puts their pairs there."""

    @property
    def experts_here(self) -> Mapping[int, int]:
        """Expert of the layer -> its number here, by which `put` knows it. Pairs of others are not read."""
        ...


@runtime_checkable
class LinearSite(Site, Protocol):
    """A plain module: y [.., out_features] from x [.., in_features]. Routers too, whose out_features is E."""

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]."""
        ...

    @property
    def in_features(self) -> int:
        """Inputs of the module."""
        ...

    @property
    def out_features(self) -> int:
        """Outputs of the module."""
        ...

    def put(self, slot: int, pairs: LoraPair, /) -> None:
        """Fills a slot."""
        ...
