"""Decode steps with a static cache, as calls on tensors at fixed addresses."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import StaticCache

LENGTH = 64


def prompts(model: Any, rows: int = 3, length: int = 12, seed: int = 0) -> Tensor:
    """Random token ids [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator).to(model.device)


class Decoding:
    """One batch of a model, step by step."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=model.device)
        self.position = torch.zeros(1, dtype=torch.long, device=model.device)

    def prefill(self, ids: Tensor) -> Tensor:
        """Fills the cache with prompts; the likeliest next token of each row."""
        self.cache.reset()
        positions = torch.arange(ids.shape[1], device=ids.device)
        found = self.model(input_ids=ids, past_key_values=self.cache, cache_position=positions)
        self.position.fill_(ids.shape[1])
        return cast("Tensor", found.logits[:, -1:].argmax(-1))

    def step(self) -> Tensor:
        """Logits behind `token` at `position`."""
        rows = self.position[None].expand(self.token.shape[0], 1)
        found = self.model(
            input_ids=self.token, past_key_values=self.cache, cache_position=self.position, position_ids=rows
        )
        return cast("Tensor", found.logits)

    def captured(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph of one step, and the logits that a replay writes."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.step()
        return graph, found
