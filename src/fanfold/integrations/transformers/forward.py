"""Forward: prompts and single tokens through a model, with a cache that grows or one of fixed size."""

from __future__ import annotations

from inspect import signature
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import StaticCache


class Forward(Protocol):
    """What is timed."""

    def prompt(self, ids: Tensor, keep: int) -> tuple[Tensor, Any]:
        """Logits [B, keep, V] of the last tokens of ids [B, S], and the cache."""
        ...

    def step(self, token: Tensor, cache: Any) -> Tensor:
        """Logits [B, V] behind the tokens [B, 1]; the cache is longer by one then."""
        ...


class ModelForward:
    """A model of transformers, with fanfold's experts or its own.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        # transformers 5.24 renamed the argument, and the field of what a forward returns.
        self._cache = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"

    def prompt(self, ids: Tensor, keep: int) -> tuple[Tensor, Any]:
        """See Forward."""
        found = self.model(input_ids=ids, use_cache=True, logits_to_keep=keep)
        return found.logits, found[self._cache]

    def step(self, token: Tensor, cache: Any) -> Tensor:
        """See Forward."""
        return self.model(input_ids=token, use_cache=True, logits_to_keep=1, **{self._cache: cache}).logits[:, -1]

    def fixed(self, ids: Tensor, room: int) -> tuple[Tensor, FixedCache]:
        """As `prompt` with keep = 1, with a cache for `room` tokens a row that stays where it is."""
        cache = StaticCache(config=self.model.config, max_cache_len=room)
        found = self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache: cache})
        return found.logits[:, -1], FixedCache(cache)


class FixedCache:
    """transformers' cache of fixed size, which counts its tokens on the device: a captured step moves on by itself."""

    def __init__(self, cache: StaticCache) -> None:
        self.cache = cache
        layers = cast("list[Any]", cache.layers)
        self._lengths: list[Tensor] = [layer.cumulative_length for layer in layers]

    def rewind(self, length: int) -> None:
        """Makes the next step write behind `length` tokens; what lies there is hidden until then."""
        for each in self._lengths:
            each.fill_(length)

    @property
    def length(self) -> int:
        """Tokens a row; waits for the device."""
        return int(torch.stack(self._lengths).max())
