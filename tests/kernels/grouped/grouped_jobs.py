"""Jobs of the grouped product for its tests: a routing, activations, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.common.layouts import run_of
from fanfold.routing.reference import plan_sort, work_list
from fanfold.spec import ProjectionWeights, Route
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.work import WorkList
from graphs import dirty_memory
from samples import numbers, random_projection, relative_error

FORMATS = [
    "bf16",
    "fp16",
    "fp32",
    *(f"gptq{bits}-g32" for bits in (2, 3, 4, 8)),
    *(f"gptq{bits}-g64-asym-{version}" for bits in (2, 3, 4, 8) for version in ("v1", "v2")),
    "gptq4-channel",
    "gptq4-g48",
    "gptq8-channel-asym-v2",
    "gptq4-g64-actorder",
    "gptq3-g64-asym-v1-actorder",
    "awq4-g64",
    "awq4-g32-asym",
    "awq4-channel-asym",
    *(f"packed{bits}-g64" for bits in (2, 3, 4, 8)),
    *(f"packed{bits}-g32-asym" for bits in (2, 3, 4, 8)),
    "packed4-channel-asym",
    "packed4-g64-asym-actorder",
    "packed4-g17-asym",
    "nvfp4",
    "nvfp4-divisor",
    "mxfp4",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block64x64",
    "fp8-block32x48",
]
# Sizes that fill no tile of 64: the last tile of outputs, the last step and the last group are short.
N, K = 32, 96


@dataclass(frozen=True, eq=False)
class Job:
    """A batch and its plan."""

    x: Tensor
    ids: Tensor
    route: Route
    work: WorkList

    @property
    def rows(self) -> int:
        """Rows that have an expert."""
        return int(self.route.expert_offsets[-1])

    @property
    def tokens(self) -> Tensor:
        return (self.route.sorted_rows // self.route.top_k).long()


def job_of(x: Tensor, ids: Tensor, experts: int, tile: int) -> Job:
    """The plan of x [T, K] with expert ids [T, k]."""
    route = plan_sort(ids, experts)
    return Job(x, ids, route, work_list(route, tile))


def random_job(
    tokens: int, top_k: int, experts: int, k: int, config: LaunchConfig, dtype: torch.dtype, device: str, seed: int = 0
) -> Job:
    """Ids of this rank, of others (-1, E) and without repetition."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts + 2, generator=generator).argsort(1)[:, :top_k].int() - 1
    return job_of(numbers(tokens, k, seed=seed, dtype=dtype).to(device), ids.to(device), experts, config.block_t)


def projection(name: str, experts: int, halves: int, n: int, k: int, device: str, seed: int = 0) -> ProjectionWeights:
    return moved(random_projection(name, experts, halves, n, k, seed), device)


def moved(weights: ProjectionWeights, device: str) -> ProjectionWeights:
    tensors = {name: tensor.to(device) for name, tensor in weights.tensors.items()}
    bias = None if weights.bias is None else weights.bias.to(device)
    return ProjectionWeights(weights.format, weights.n, weights.k, tensors, bias)


def configs(weights: ProjectionWeights, dtype: torch.dtype, device: str, block_t: int = 16) -> list[LaunchConfig]:
    """Small ones for the interpreter; some of the tables for a GPU, which compiles each: scales on sums, on weights."""
    if device == "cuda":
        from fanfold.kernels.common.device import arch_of
        from fanfold.kernels.grouped.configs import all_configs

        arch = arch_of(torch.device(device))
        alone = {c.block_t: c for c, fused in all_configs(weights.format, weights.k, dtype, arch) if not fused}
        return [alone[t] for t in ((32,) if dtype == torch.float16 else (16, 64, 128)) if t in alone]
    run = run_of(weights.format, weights.k)
    on_sum = run > 0 and run % 32 == 0
    return [LaunchConfig(64, 64, block_t, 4, 2), LaunchConfig(32, 32, block_t, 4, 2, scale_on_sum=on_sum)]


def exact(weights: ProjectionWeights, x: Tensor, route: Route, half: int) -> Tensor:
    """fp64 [R', N] of x [R', K], the rows that have an expert, in sorted order."""
    return _by_expert(route, x, weights, half, lambda rows, w: rows.double() @ w.double().T)


def plain(weights: ProjectionWeights, x: Tensor, route: Route, half: int) -> Tensor:
    """As `exact`, evaluated plainly in x's dtype: rounded weights, the product of torch."""
    return _by_expert(route, x, weights, half, lambda rows, w: rows @ w.to(rows.dtype).T)


def _by_expert(
    route: Route, x: Tensor, weights: ProjectionWeights, half: int, product: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    offsets = route.expert_offsets.tolist()
    parts = []
    for e in range(weights.num_experts):
        if offsets[e] < offsets[e + 1]:
            y = product(x[offsets[e] : offsets[e + 1]], dequantize_expert(weights, e, half))
            parts.append(y if weights.bias is None else y + weights.bias[e, half].to(y.dtype))
    return torch.cat(parts) if parts else x.new_zeros(0, weights.n)


def check_close(found: Tensor, exactly: Tensor, plainly: Tensor) -> None:
    """Within twice the error of the plain evaluation; norms are compared as well as directions."""
    tolerance = max(2 * relative_error(plainly, exactly), 1e-6)
    assert relative_error(found, exactly) <= tolerance
    assert abs(float(found.double().norm() / exactly.norm()) - 1) <= tolerance


def check_gate_up(weights: ProjectionWeights, job: Job, config: LaunchConfig) -> Tensor:
    """gate_up of the job against the reference, each half apart; returns y1."""
    from fanfold.kernels.grouped.launch import grouped_gate_up

    dirty_memory(job.x.device.type)
    y1 = grouped_gate_up(job.x, weights, job.work, job.route.sorted_rows, job.route.top_k, config)
    assert (y1.shape, y1.dtype) == ((job.ids.numel(), weights.halves * weights.n), job.x.dtype)
    x = job.x[job.tokens[: job.rows]]
    for half in range(weights.halves):
        found = y1[: job.rows, half * weights.n : (half + 1) * weights.n]
        check_close(found, exact(weights, x, job.route, half), plain(weights, x, job.route, half))
    return y1
