"""Experts over the ranks of torchrun: exchange, experts and both together, once the result is known to be right.

torchrun --standalone --nproc-per-node 2 benchmarks/expert_parallel.py: see README.md beside this file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor

from fanfold.bench.jobs import LayerShape, layer_shape
from fanfold.bench.machine import machine
from fanfold.bench.timing import WARM_UP, Replays, Times, all_of
from fanfold.bench.weights import random_experts
from fanfold.cli.output import print_json
from fanfold.distributed import ExpertParallel, Placement
from fanfold.layers.experts import Experts
from fanfold.spec import ExpertWeights, WeightFormat
from fanfold.spec.weights import ProjectionWeights

DTYPE = torch.bfloat16
CALLS, ROUNDS = 20, 50
"""Calls of a round, and rounds: the same on all ranks."""
EXCHANGES = [
    ("all_reduce", True, False),
    ("all_reduce", False, False),
    ("all_to_all", True, False),
    ("all_to_all", False, False),
    ("all_to_all", True, True),
    ("all_to_all", False, True),
]
"""Exchange, whether exact, whether with a bound."""


def part(weights: ExpertWeights, experts: tuple[int, ...]) -> ExpertWeights:
    """Some experts of a layer."""

    def of(projection: ProjectionWeights) -> ProjectionWeights:
        tensors = {name: tensor[list(experts)] for name, tensor in projection.tensors.items()}
        return replace(projection, tensors=tensors)

    return ExpertWeights(of(weights.gate_up), of(weights.down))


def median_us(call: Callable[[], Tensor], device: torch.device, graph: bool) -> float:
    """Of a call that all ranks make, as many times on each; in a CUDA graph where it can be captured."""
    turn = Replays([call] * CALLS).replay if graph else all_of([call] * CALLS)
    us: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        turn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        us.append(1e6 * (time.perf_counter() - start) / CALLS)
    return Times.of(us[WARM_UP:]).median_us


def measure(shape: LayerShape, name: str, tokens: int, device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """A row of results; `tokens` are those of the batch of all (all_reduce), or of each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, shared = shape.experts, options["exchange"] == "all_reduce"
    weights = random_experts(shape, WeightFormat.parse(name), device, seed=0)
    placement = Placement.even(sizes.num_experts, size)
    own = Experts(part(weights, placement.ranks[rank]), shape.activation, dtype=DTYPE, batch_invariant=True)
    whole = Experts(weights, shape.activation, dtype=DTYPE, batch_invariant=True)
    layer = ExpertParallel(own, placement=placement, **options)
    generator = torch.Generator(device).manual_seed(0 if shared else rank)
    x = torch.randn(tokens, sizes.hidden, device=device, generator=generator).to(DTYPE)
    scores = torch.rand(tokens, sizes.num_experts, device=device, generator=generator)
    chosen = scores.topk(shape.top_k)
    ids, router = chosen.indices, chosen.values / chosen.values.sum(-1, keepdim=True)
    found, expected = layer(x, ids, router), whole(x, ids, router)
    error = ((found - expected).float().norm() / expected.float().norm()).item()
    if not (torch.equal(found, expected) if options["exact"] else error < 0.01):
        raise SystemExit(f"{name}, {options}: relative error {error:.1e} on rank {rank}: no figures")

    seen: list[tuple[Tensor, ...]] = []

    def run(hidden: Tensor, own_ids: Tensor, own_weights: Tensor, slots: Tensor | None) -> Tensor:
        seen[:] = [(hidden, own_ids, own_weights)]
        return hidden

    exchange = layer.exchanging
    exchange(run, x.clone(), ids, router, None)
    given = seen[0]
    graph = device.type == "cuda" and (shared or options["bound"] is not None)
    both = median_us(lambda: layer(x, ids, router), device, graph)
    moving = median_us(lambda: exchange(run, x.clone(), ids, router, None), device, graph)
    computing = median_us(lambda: own(*given), device, graph)
    times = {"both_us": both, "exchange_us": moving, "experts_us": computing, "overlap_us": moving + computing - both}
    job = {"shape": shape.name, "format": name, "tokens": tokens, "ranks": size, "rank": rank, **options}
    return {**job, "graph": graph, **times, "error": error, **machine(device)}


def main(
    shape: Annotated[str, typer.Option(help="E,k,H,I, or a name of `fanfold bench`.")] = "128,8,4096,1536",
    formats: Annotated[str, typer.Option(help="Separated by commas.")] = "gptq4-g128,nvfp4",
    tokens: Annotated[str, typer.Option(help="Separated by commas.")] = "1,16,64,1024",
    out: Annotated[Path | None, typer.Option(help="Also write rows there, a JSON line each (rank 0).")] = None,
) -> None:
    """Times every exchange; all ranks take part, rank 0 prints."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    for name in formats.split(","):
        for count in map(int, tokens.split(",")):
            for exchange, exact, bounded in EXCHANGES:
                bound = count * (layer_shape(shape).top_k if exact else 1) if bounded else None
                options = {"exchange": exchange, "exact": exact, "bound": bound}
                row = measure(layer_shape(shape), name, count, device, options)
                if dist.get_rank() == 0:
                    print_json(row)
                    if out is not None:
                        with out.open("a", encoding="utf-8") as file:
                            file.write(f"{json.dumps(row)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
