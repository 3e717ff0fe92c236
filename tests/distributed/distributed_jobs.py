"""What ranks do in tests: each function runs in every process of a group."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from fanfold.distributed import ExpertParallel, ExpertPlan, Placement, load_experts
from fanfold.integrations.transformers import register
from fanfold.integrations.transformers.model import load_model
from fanfold.layers.experts import Experts
from fanfold.spec import ExpertWeights
from fanfold.spec.weights import ProjectionWeights
from samples import SILU, logits, numbers, random_experts, random_routing

EXPERTS, TOP_K, TOKENS, HIDDEN, INTERMEDIATE = 8, 3, 9, 64, 32


def weights_of(name: str) -> ExpertWeights:
    """The same layer in every process."""
    return random_experts(name, EXPERTS, HIDDEN, INTERMEDIATE)


def part(weights: ExpertWeights, experts: tuple[int, ...]) -> ExpertWeights:
    """Some experts of a layer."""

    def of(projection: ProjectionWeights) -> ProjectionWeights:
        chosen = list(experts)
        bias = None if projection.bias is None else projection.bias[chosen]
        tensors = {name: tensor[chosen] for name, tensor in projection.tensors.items()}
        return replace(projection, tensors=tensors, bias=bias)

    return ExpertWeights(of(weights.gate_up), of(weights.down))


def batch(dtype: torch.dtype, tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights; one slot is of no expert, with a weight that must not be read."""
    ids, weights = random_routing(tokens, TOP_K, EXPERTS, seed)
    if tokens:
        ids[0, 1], weights[0, 1] = -1, float("nan")
    return numbers(tokens, HIDDEN, seed=seed + 50).to(dtype), ids, weights


def spread(name: str, dtype: torch.dtype, placement: Placement | None = None, **options: Any) -> ExpertParallel:
    """This rank's part of a layer."""
    placed = placement or Placement.even(EXPERTS, dist.get_world_size())
    own = Experts(part(weights_of(name), placed.ranks[dist.get_rank()]), SILU, dtype=dtype)
    return ExpertParallel(own, placement=placement, **options)


def forward(name: str, dtype: torch.dtype, placement: Placement | None, tokens: int, options: dict[str, Any]) -> Tensor:
    """The layer's result where all ranks have the same tokens."""
    return spread(name, dtype, placement, **options)(*batch(dtype, tokens))


def bytes_read() -> int:
    """What this process has read with system calls since it began."""
    return int(Path("/proc/self/io").read_text().split()[1])


def load_layer(path: Path, plan: dict[str, Any]) -> tuple[Tensor, int, int]:
    """The result for a batch of three tokens, bytes that were read for it, and how many experts are here."""
    load_experts(path, 1, ExpertPlan(**plan))  # imports what it needs
    before = bytes_read()
    experts = load_experts(path, 1, ExpertPlan(**plan))
    read = bytes_read() - before
    x = numbers(3, experts.shape.hidden).to(experts.dtype)
    return experts(x, *random_routing(3, 2, experts.shape.num_experts)), read, experts.experts.shape.num_experts


def load_whole(path: Path, tokens: Tensor, plan: dict[str, Any]) -> tuple[Tensor, int, list[str]]:
    """Logits, bytes that were read, and the formats of the experts."""
    load_model(path, parallel=ExpertPlan(**plan))
    before = bytes_read()
    model = load_model(path, parallel=ExpertPlan(**plan))
    read = bytes_read() - before
    layers = [module for module in model.modules() if isinstance(module, ExpertParallel)]
    return logits(model, tokens), read, [layer.experts.formats[0].name for layer in layers]


def load_with_transformers(path: Path, tokens: Tensor, implementation: str) -> tuple[Tensor, int]:
    """Logits of a model that transformers has loaded and spread, and how many experts are here."""
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()))
    register()
    size = dist.get_world_size()
    config: Any = AutoConfig.from_pretrained(path)
    # transformers 5.24 wants a rule for tp_size > 1: one under which attention stays whole on every rank.
    config.base_model_tp_plan = {"layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"}
    evenly = DistributedConfig(tp_size=size, ep_size=size, ep_implementation=implementation)
    options: Any = {"experts_implementation": "fanfold", "dtype": torch.bfloat16, "distributed_config": evenly}
    model: Any = AutoModelForCausalLM.from_pretrained(path, config=config, **options)
    return logits(model.eval(), tokens), model.model.layers[0].mlp.experts.num_experts


def tokens_of(rank: int) -> int:
    """Another number on each rank, none on the second."""
    return (7, 0, 12, 1)[rank]


def forward_own(name: str, dtype: torch.dtype, placement: Placement | None, options: dict[str, Any]) -> Tensor:
    """The layer's result for tokens of this rank alone."""
    rank = dist.get_rank()
    return spread(name, dtype, placement, exchange="all_to_all", **options)(*batch(dtype, tokens_of(rank), rank))
