"""Transformers' own experts as peers of `fanfold bench`, by the names of its implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fanfold.bench.batches import Batch
from fanfold.bench.peers import DenseExperts, Prepared

NAMES = ("eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True)
class TransformersExperts:
    """One implementation, run by the experts of Qwen3-MoE, which are those of most families."""

    implementation: str

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"transformers {self.implementation}"

    @property
    def captured(self) -> bool:
        """The eager ones ask the device which experts have rows."""
        return self.implementation != "eager"

    def prepare(self, dense: DenseExperts, batch: Batch) -> Prepared:
        """See Peer."""
        sizes = dense.shape.experts
        config = Qwen3MoeConfig(
            hidden_size=sizes.hidden,
            moe_intermediate_size=sizes.intermediate,
            num_experts=sizes.num_experts,
            num_experts_per_tok=dense.shape.top_k,
        )
        cast("Any", config)._experts_implementation = self.implementation
        with torch.device("meta"):
            experts = cast("Any", Qwen3MoeExperts(config))
        experts.gate_up_proj = nn.Parameter(dense.gate_up, requires_grad=False)
        experts.down_proj = nn.Parameter(dense.down, requires_grad=False)
        ids, weights = batch.topk_ids.long(), batch.topk_weights.to(batch.hidden.dtype)
        return lambda: experts(batch.hidden, ids, weights)
