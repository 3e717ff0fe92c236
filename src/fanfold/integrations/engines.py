"""Experts of serving engines as peers of `fanfold bench`, by their public functions.

Written against vLLM 0.20 and DeepGEMM as its wheel carries it; neither has been run from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from fanfold.bench.batches import Batch
from fanfold.bench.peers import DenseExperts, Prepared

VLLM = "vllm.model_executor.layers.fused_moe.fused_moe"
DEEPGEMM = ("deep_gemm", "vllm.third_party.deep_gemm")
ROWS = 128
"""DeepGEMM's contiguous layout pads each expert's rows to a multiple of this."""


class Vllm:
    """vLLM's Triton experts on bf16 weights, with the tables it ships."""

    name = "vllm"
    captured = True

    def __init__(self) -> None:
        self._fused_experts: Any = import_module(VLLM).fused_experts

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        """See Peer."""
        return lambda: self._fused_experts(batch.hidden, dense.gate_up, dense.down, batch.topk_weights, batch.topk_ids)


class DeepGemm:
    """DeepGEMM's grouped products on bf16 weights, with torch's gather, activation and weighted sum.

    Where each row lies is worked out before the call: DeepGEMM leaves that to its host.
    """

    name = "deepgemm"
    captured = True

    def __init__(self) -> None:
        self._product: Any = _first(DEEPGEMM).m_grouped_bf16_gemm_nt_contiguous

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        """See Peer."""
        sizes, device = dense.shape.experts, batch.hidden.device
        source, place, expert_of = padded_rows(batch.topk_ids, sizes.num_experts)
        rows = len(expert_of)
        y1 = torch.empty(rows, 2 * sizes.intermediate, dtype=batch.hidden.dtype, device=device)
        y2 = torch.empty(rows, sizes.hidden, dtype=batch.hidden.dtype, device=device)
        weights = batch.topk_weights.to(batch.hidden.dtype)[..., None]

        def call() -> Tensor:
            self._product(batch.hidden[source], dense.gate_up, y1, expert_of)
            gate, up = y1.chunk(2, -1)
            self._product(silu(gate) * up, dense.down, y2, expert_of)
            return (y2[place].view(*batch.topk_ids.shape, -1) * weights).sum(1)

        return call


def padded_rows(topk_ids: Tensor, experts: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """Where the rows of a routing lie, each expert's padded to a multiple of `rows`.

    Returns:
        The token of each padded row (0 where it is padding), the padded row of each (token, slot), and the expert of
        each padded row, int32.
    """
    flat, top_k = topk_ids.flatten().long(), topk_ids.shape[1]
    counts = flat.bincount(minlength=experts)
    padded = (counts + rows - 1) // rows * rows
    starts = padded.cumsum(0) - padded
    order = flat.argsort(stable=True)
    inside = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    place = torch.empty_like(flat)
    place[order] = starts[flat[order]] + inside
    source = torch.zeros(int(padded.sum()), dtype=torch.int64, device=flat.device)
    source[place] = torch.arange(len(flat), device=flat.device) // top_k
    expert_of = torch.repeat_interleave(torch.arange(experts, device=flat.device), padded)
    return source, place, expert_of.int()


def _first(modules: tuple[str, ...]) -> Any:
    """The first of some modules that is there."""
    for name in modules[:-1]:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(modules[-1])
