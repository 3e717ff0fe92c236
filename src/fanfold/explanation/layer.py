"""explain: one layer of given sizes."""

from __future__ import annotations

from typing import Any, cast

import torch

from fanfold.errors import ArgumentError
from fanfold.explanation.launches import launches
from fanfold.explanation.work import Batch, work
from fanfold.select import arch_name, verdicts
from fanfold.spec.arch import ARCHS, BLOCK_SCALED, RUN, SHARED_BYTES
from fanfold.spec.job import LayerJob
from fanfold.spec.lora import MOST_RANK
from fanfold.spec.shape import ExpertShape
from fanfold.spec.verdict import Accepted, Rejected
from fanfold.spec.weight_format import WeightFormat


def explain(
    shape: ExpertShape | tuple[int, int, int],
    format: WeightFormat | str,
    arch: int | str,
    rows: int,
    top_k: int = 1,
    adapters: int = 0,
    rank: int = 16,
) -> dict[str, Any]:
    """What runs a layer and with which configs, what doesn't and why, bytes, flops and the floor.

    Activations are bf16; between gate_up and down is SiLU (relu2 without a gate).

    Args:
        shape: the layer's sizes, or (num_experts, hidden, intermediate).
        format: of gate_up and down, or its name, e.g. `gptq4-g128`.
        arch: "cpu", or a compute capability such as 90.
        rows: (token, expert) pairs, T * top_k.
        top_k: experts a token; 1 takes every row as a token.
        adapters: of the batch, on gate, up and down of every expert; every token has one.
        rank: of the adapters.

    Returns:
        What was asked (`shape`, `format`, `dtype`, `activation_format`, `arch`, `rows`, `tokens`, `top_k`, `adapters`,
        `rank`), and:

        `chosen`: the implementation, or None; `rejected`: name -> reason.
        `never_run`: what of this nobody has run: kernels that are compiled for a GPU, no more.
        `launches`: the kernels of a call in order: step, kernel, config, settings, from (the config of the row of the
            table, or where the config comes from), changed (why it is not that of the row).
        `table`: the row of the tuned table that the configs come from, or None.
        `expected_us`: what such a layer has been measured at, by step and as `layer`; None where it has not.
        `parts`: bytes and flops of gate_up, down, pairs (of adapters) and activations.
        `weight_bytes`, `pair_bytes`: of the experts, and of the adapters' pairs, that so many rows meet at most.
        `flops`: multiplications and additions of the products, those of adapters with them.
        `floor_us`: the longer of reading these bytes and computing, at the rates of `floor_of`; None where the
            device's rates are not known. Activations are left out: they may stay in the cache.
        `uniform`: the same with the mean over uniform routings: experts met, bytes, floor_us.

    Raises:
        ArgumentError: rows that are no multiple of top_k, an unknown arch, a rank or number of adapters, or sizes
            that are none.
        UnsupportedError: a format of another name, or that can't hold such sizes.
    """
    shape = shape if isinstance(shape, ExpertShape) else _shape(shape)
    fmt = format if isinstance(format, WeightFormat) else WeightFormat.parse(format)
    if top_k < 1 or rows < 0 or rows % top_k:
        raise ArgumentError(
            "rows",
            found=f"{rows}, top_k {top_k}",
            expected="0 or more, a multiple of top_k",
            next_step="Pass tokens * top_k.",
        )
    job = LayerJob(shape, fmt, fmt, "silu" if shape.gated else "relu2", torch.bfloat16)
    return explain_job(job, arch, rows // top_k, top_k, adapters, rank)


def explain_job(
    job: LayerJob, arch: int | str, tokens: int, top_k: int, adapters: int = 0, rank: int = 16
) -> dict[str, Any]:
    """`explain`, of a layer with formats, activation and dtype of its own.

    Raises:
        ArgumentError: as for `explain`.
        UnsupportedError: a format that can't hold such sizes.
    """
    name = arch_name(arch)
    if adapters < 0 or not 1 <= rank <= MOST_RANK:
        raise ArgumentError(
            "adapters, rank",
            found=f"{adapters}, {rank}",
            expected=f"0 or more adapters, a rank of 1 to {MOST_RANK}",
            next_step="Pass the adapters of a batch and their largest rank.",
        )
    batch = Batch(tokens, top_k, adapters, rank)
    found = verdicts(job, name)
    chosen = next((verdict.kernel for verdict in found if isinstance(verdict, Accepted)), None)
    shape, ran = job.shape, launches(chosen, job, batch, name)
    return {
        "shape": {"num_experts": shape.num_experts, "hidden": shape.hidden, "intermediate": shape.intermediate},
        "format": ", ".join(dict.fromkeys((job.gate_up.name, job.down.name))),
        "dtype": str(job.dtype).removeprefix("torch."),
        "activation_format": job.activation_format,
        "arch": name,
        "rows": batch.rows,
        "tokens": tokens,
        "top_k": top_k,
        "adapters": adapters,
        "rank": rank if adapters else None,
        "chosen": chosen,
        "rejected": {verdict.kernel: verdict.reason for verdict in found if isinstance(verdict, Rejected)},
        "never_run": never_run(job, chosen, name),
        "launches": ran.steps,
        "table": ran.table,
        "expected_us": ran.expected,
        **work(job, batch, ARCHS.get(name)),
    }


def never_run(job: LayerJob, chosen: str | None, arch: str) -> list[str]:
    """What has not run there: the kernels of the layer, and of NVFP4 the instructions that its operations use.

    Args:
        job: the layer.
        chosen: what runs it.
        arch: `cpu` or `sm_NN`.
    """
    if arch == "cpu" or arch in RUN:
        return []
    state = "compiled, never run" if arch in SHARED_BYTES else "neither compiled here nor run"
    found = [] if chosen in (None, "reference") else [f"kernels on {arch}: {state}"]
    if "nvfp4" in (job.gate_up.kind, job.down.kind) and int(arch.removeprefix("sm_")) >= BLOCK_SCALED:
        found.append(f"block-scaled instructions of torch.ops.fanfold.nvfp4_* on {arch}: {state}")
    return found


def _shape(sizes: object) -> ExpertShape:
    numbers = cast("tuple[object, ...]", sizes) if isinstance(sizes, tuple) else ()
    found = [size for size in numbers if isinstance(size, int)]
    if len(numbers) != 3 or len(found) != 3:
        raise ArgumentError(
            "shape",
            found=repr(cast("object", sizes)),
            expected="an ExpertShape, or (num_experts, hidden, intermediate)",
            next_step="Pass the sizes of the model's config.json.",
        )
    return ExpertShape(found[0], found[1], found[2])
