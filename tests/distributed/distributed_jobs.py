"""What ranks do in tests: each function runs in every process of a group."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from parts import part
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from fanfold.distributed import ExpertParallel, ExpertPlan, Placement, load_experts
from fanfold.errors import DeviceMemoryError, FanfoldError
from fanfold.integrations.transformers import register
from fanfold.integrations.transformers.model import load_model
from fanfold.layers.experts import Experts
from fanfold.lora.files import AdapterFile, Fetched
from fanfold.lora.pool import AdapterPool
from fanfold.spec import ExpertShape, ExpertWeights
from samples import SILU, logits, numbers, random_experts, random_routing

EXPERTS, TOP_K, TOKENS, HIDDEN, INTERMEDIATE = 8, 3, 9, 64, 32
_PUT = Experts.put


def weights_of(name: str) -> ExpertWeights:
    """The same layer in every process."""
    return random_experts(name, EXPERTS, HIDDEN, INTERMEDIATE)


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


def load_whole(path: Path, tokens: Tensor, by_config: bool) -> tuple[Tensor, int, list[str]]:
    """Logits, bytes that were read, and the formats of the experts; by_config: in transformers' words."""
    size = dist.get_world_size()
    plan = DistributedConfig(tp_size=size, tp_plan={}, ep_size=size) if by_config else ExpertPlan()
    load_model(path, parallel=plan)
    before = bytes_read()
    model = load_model(path, parallel=plan)
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


def folder_of(rank: int, folders: dict[int, Path], path: Path) -> Path:
    """What a rank is given in place of `path`, where it is given something else."""
    return folders.get(rank, path)


def adapted(
    path: Path, adapters: dict[str, Path], names: list[list[str | None]], plan: dict[str, Any]
) -> tuple[Tensor, int, dict[str, int]]:
    """A layer's result with adapters, bytes of pairs read for the last of them, and its pairs here.

    Every rank has tokens of its own where `names` has a list for each, else all have the same.
    """
    experts = load_experts(path, 1, ExpertPlan(**plan))
    pool = AdapterPool(experts, slots=len(adapters))
    read = 0
    fetch = AdapterFile.fetch

    def counting(file: AdapterFile, *what: Any) -> Fetched:
        nonlocal read
        fetched = fetch(file, *what)
        read += len(fetched.host)
        return fetched

    AdapterFile.fetch = counting
    for name, folder in adapters.items():
        read = 0
        pool.load(name, folder)
    AdapterFile.fetch = fetch
    rank = dist.get_rank() if len(names) > 1 else 0
    with pool.using(names[rank]):
        y = experts(*adapted_batch(experts.shape, experts.dtype, len(names[rank]), rank))
    return y, read, cast("dict[str, int]", pool.info()[-1]["targets"])


def adapted_batch(shape: ExpertShape, dtype: torch.dtype, tokens: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, ids and weights of a rank."""
    return numbers(tokens, shape.hidden, seed=rank).to(dtype), *random_routing(tokens, 2, shape.num_experts, rank)


def adapted_model(path: Path, adapters: dict[str, Path], names: list[str | None], tokens: Tensor) -> Tensor:
    """Logits of a whole model."""
    model = load_model(path, parallel=ExpertPlan())
    for name, folder in adapters.items():
        model.adapters.load(name, folder)
    with model.adapters.using(names):
        return logits(model, tokens)


def pool_steps(path: Path, adapter: Path, others: dict[int, Path]) -> list[str]:
    """What a pool says of steps that one rank can't make, and what it holds after each."""
    experts = load_experts(path, 1)
    pool, rank = AdapterPool(experts, slots=2), dist.get_rank()
    said: list[str] = []

    def attempt(step: Callable[[], Any]) -> None:
        try:
            step()
            said.append(f"done: {pool.names()}")
        except FanfoldError as error:
            said.append(f"{type(error).__name__}: {error.found}: {pool.names()}")

    attempt(lambda: pool.load("a", folder_of(rank, others, adapter)))
    attempt(lambda: pool.load("b" if rank else "a", adapter))
    attempt(lambda: pool.load("a", adapter))
    before = dict(experts.experts.pairs["down"])
    put = Experts.put
    for step in (lambda: pool.load("c", adapter), lambda: pool.replace("a", others[2])):
        if rank == 1:
            Experts.put = _no_room
        attempt(step)
        Experts.put = put
    said.append(str(sorted({slot for pairs in experts.experts.pairs.values() for slot, _ in pairs})))
    said.append(str(experts.experts.pairs["down"] == before))
    attempt(lambda: pool.replace("a", others[2]))
    said.append(str(experts.experts.pairs["down"] == before))
    with pool.using(["a"] if rank else [None]):
        attempt(lambda: pool.unload("a"))
    attempt(lambda: pool.unload("a"))
    return said


def _no_room(layer: Experts, *_: object) -> None:
    """Once: what was there is put back."""
    Experts.put = _PUT
    raise DeviceMemoryError("device", found="no room", expected="room", next_step="Free some.")


def bytes_sent(tokens: int, options: dict[str, Any]) -> int:
    """What this rank sends to others in a forward of tokens of its own, counts aside."""
    rank = dist.get_rank()
    layer = spread("bf16", torch.bfloat16, exchange="all_to_all", **options)
    sent = 0

    def counting(out: Tensor, rows: Tensor, *splits: Any, group: Any) -> None:
        nonlocal sent
        to = splits[1] if splits else [len(rows) // dist.get_world_size()] * dist.get_world_size()
        sent += rows.dtype != torch.int64 and (len(rows) - to[rank]) * rows[:1].nbytes
        all_to_all(out, rows, *splits, group=group)

    def gathering(out: Tensor, rows: Tensor, group: Any) -> None:
        nonlocal sent
        sent += rows.nbytes * (dist.get_world_size() - 1)
        gather(out, rows, group=group)

    all_to_all, gather = dist.all_to_all_single, dist.all_gather_single
    dist.all_to_all_single, dist.all_gather_single = counting, gathering
    try:
        layer(*batch(torch.bfloat16, tokens, seed=rank))
    finally:
        dist.all_to_all_single, dist.all_gather_single = all_to_all, gather
    return sent


def benchmark(file: Path, options: dict[str, Any]) -> dict[str, Any]:
    """A row of benchmarks/expert_parallel.py, of a small layer and few calls."""
    spec = spec_from_file_location("expert_parallel", file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CALLS, module.ROUNDS, module.WARM_UP = 1, 2, 0
    return module.measure(module.layer_shape("8,2,128,64"), "nvfp4", 5, torch.device("cpu"), options)


def generate_own(path: Path, prompts: list[Tensor], lengths: list[int]) -> Tensor:
    """Each rank's own prompts, continued by as many tokens as it wants."""
    rank = dist.get_rank()
    model = load_model(path, parallel=ExpertPlan(exchange="all_to_all"))
    return model.generate(prompts[rank], max_new_tokens=lengths[rank], do_sample=False, synced_gpus=True)


def forward_in_pairs(name: str, dtype: torch.dtype) -> Tensor:
    """The layer over two ranks of four; the other two have one of their own, and other tokens."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, rank = divmod(dist.get_rank(), 2)
    placed = Placement.even(EXPERTS, 2)
    own = Experts(part(weights_of(name), placed.ranks[rank]), SILU, dtype=dtype)
    return ExpertParallel(own, groups[pair])(*batch(dtype, TOKENS, pair))
