"""Pace: one row of results of a whole model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from fanfold.bench.machine import machine

Experts = Literal["fanfold", "eager", "grouped_mm", "batched_mm"]
EXPERTS: tuple[Experts, ...] = ("fanfold", "eager", "grouped_mm", "batched_mm")
SCHEMA = 2


@dataclass(frozen=True)
class Pace:
    """One model and batch.

    Attributes:
        model: the checkpoint's folder, or the name of a model of random weights.
        layers: of a model of random weights; None: a checkpoint, all of it.
        weights: of the experts, as they run.
        experts: what runs the experts: fanfold, or one of transformers' implementations.
        batch: rows.
        prompt: tokens of a row.
        new: decode steps that were timed.
        adapters: adapters that the rows have in turn, the base among them; 0 = the base alone.
        prefill_ms: the prompt's forward, to the first token.
        decode_ms: a step of the whole batch, eager, the median.
        tokens_per_second: decoded by all rows.
        graph_ms: a step as the replay of a CUDA graph, the median.
        graph_tokens_per_second: decoded by all rows.
        graph_difference: of the logits of replays from those of eager steps: relative, the most of any step and row.
        graph_refused: why there is no such time; None on a CPU too.
        peak_bytes: most memory that was allocated on the GPU, weights included; None on a CPU.
        difference: of the prompt's last logits from fanfold's: relative, the median over tokens.
        refused: why there are no times.
    """

    model: str
    layers: int | None
    weights: str
    experts: Experts
    batch: int
    prompt: int
    new: int
    adapters: int
    prefill_ms: float | None = None
    decode_ms: float | None = None
    tokens_per_second: float | None = None
    graph_ms: float | None = None
    graph_tokens_per_second: float | None = None
    graph_difference: float | None = None
    graph_refused: str | None = None
    peak_bytes: int | None = None
    difference: float | None = None
    refused: str | None = None

    def row(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """All of it by name, with device, dtype and machine."""
        of_device = {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
        return {"schema": SCHEMA, **asdict(self), **of_device, **machine(device)}
