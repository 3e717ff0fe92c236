"""Seeds: one number a run, and streams of random numbers of it that have nothing in common."""

from __future__ import annotations

from typing import Literal

import torch

Purpose = Literal["weights", "pairs", "hidden", "routing", "adapters"]
PURPOSES: tuple[Purpose, ...] = ("weights", "pairs", "hidden", "routing", "adapters")


def generator_of(purpose: Purpose, seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Random numbers for one purpose: with one stream for all, hidden states would be rows of the weights."""
    return torch.Generator(device).manual_seed(seed * len(PURPOSES) + PURPOSES.index(purpose))
