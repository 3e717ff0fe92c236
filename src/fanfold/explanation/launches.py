"""Launches: the kernels of a call in order, each with its config and where that comes from.

What `layers/implementations` does, told without tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fanfold.explanation.work import Batch
from fanfold.kernels.combine.config import columns
from fanfold.kernels.common.tables import SIZES, Header
from fanfold.kernels.grouped.configs import LARGE, family_of
from fanfold.kernels.grouped.sm90.config import Sm90Config, misfits
from fanfold.kernels.grouped.sm90.configs import Sizes, layer_configs
from fanfold.kernels.grouped.sm90.weights import padded
from fanfold.kernels.grouped.tuned import layer_configs as grouped_configs
from fanfold.kernels.lora.config import GATHER_TILE, takes_one_launch
from fanfold.kernels.lora.config import config_for as fold_config_for
from fanfold.kernels.lora.sizes import FEW_ROWS, row_tile
from fanfold.layers.experts import arch_of
from fanfold.spec.activation_format import PLAIN
from fanfold.spec.job import LayerJob
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weight_format import WeightFormat

Step = dict[str, Any]
GROUP_MEASURED = 128
"""Group size of the integers that the table's times were measured with."""


@dataclass(frozen=True)
class Launches:
    """What runs, in order.

    Attributes:
        steps: `step`, `kernel` (its folder), `config` (its name, or what stands for one), `settings` (the config's
            fields), `from` (the config of the row of the table, or where the config comes from) and `changed` (why it
            is not that of the row).
        table: the row of the tuned table, and the table's machine; None where there is no table.
        expected: microseconds a step that this very layer and number of tokens have been measured at; None: not
            measured.
    """

    steps: list[Step]
    table: dict[str, Any] | None = None
    expected: dict[str, float] | None = None


def launches(implementation: str | None, job: LayerJob, batch: Batch, arch: str) -> Launches:
    """The launches of one call.

    Args:
        implementation: of `select`; the reference, and None, launch nothing.
        job: the layer.
        batch: what it is called with.
        arch: `sm_NN`, or cpu.
    """
    if batch.rows == 0 or implementation not in _LAUNCHES:
        return Launches([])
    return _LAUNCHES[implementation](job, batch, int(arch.removeprefix("sm_")))


def _grouped(job: LayerJob, batch: Batch, arch: int) -> Launches:
    """Of `implementations/grouped.py`: act-order is sorted by group when the layer is loaded."""
    up, down = (replace(fmt, act_order=False) for fmt in (job.gate_up, job.down))
    w8a8 = job.activation_format == "fp8"
    found = grouped_configs(
        up, down, job.shape, job.dtype, arch, batch.tokens, batch.top_k, w8a8, gpu=gpu_of(f"sm_{arch}")
    )
    first, second, row = found.gate_up, found.down, found.row
    table = f"configs.py, {'227' if arch in LARGE else '99'} KiB"

    def product(step: str, fmt: WeightFormat, config: LaunchConfig, fused: bool) -> Step:
        family = family_of(fmt, job.dtype, w8a8)
        kind = f"{family}, {'with the activation' if fused else 'alone'}, {config.block_t} rows a tile"
        source = f"{table}: {kind}" if row is None else config.name
        return _step(step, "kernels/grouped", config.name, asdict(config), source)

    steps = [
        *_plan(batch, first.block_t),
        *_order("x", job.gate_up, "kernels/grouped/act_order"),
        *_rounded("x", job),
        product("gate_up", up, first, True),
        *_fold("gate_up", job, batch, arch),
        *_order("h", job.down, "kernels/grouped/act_order"),
        *_rounded("h", job),
        product("down", down, second, False),
        *_fold("down", job, batch, arch),
        _sum(batch),
    ]
    if row is None:
        return Launches(steps)
    plain = job.activation_format == PLAIN and not batch.adapters
    measured = plain and row.tokens == batch.tokens and not job.gate_up.act_order
    return Launches(steps, _row(row, row.header) | {"run": 0, "same_layer": True}, dict(row.us) if measured else None)


def _grouped_int4_sm90(job: LayerJob, batch: Batch, arch: int) -> Launches:
    """Of `implementations/grouped_int4_sm90.py`: down's act-order costs no launch."""
    shape, alone = job.shape, batch.adapters == 0
    gate_up = job.gate_up, padded(shape.halves * shape.intermediate), padded(shape.hidden)
    down = job.down, padded(shape.hidden), padded(shape.intermediate)
    sizes = shape.hidden, shape.intermediate, shape.num_experts
    short = job.gate_up.kind == job.down.kind == "packed"  # compressed-tensors stores scales in bf16
    found = layer_configs(gate_up, down, *sizes, batch.tokens, batch.top_k, gpu=gpu_of(f"sm_{arch}"), short=short)
    row = found.row

    def product(step: str, config: Sm90Config, start: Sm90Config, sizes: Sizes) -> Step:
        changed = list(misfits(start, *sizes, step == "gate_up")) if config != start else []
        if config != start and not changed:
            moved = start.scale_on_sum and not config.scale_on_sum
            changed = [
                "scales on the weights, faster or in fewer registers" if moved else "scales that fit in registers"
            ]
        chained = {"chained": found.chained}
        return _step(step, "kernels/grouped/sm90", config.name, asdict(config) | chained, start.name, changed)

    def with_fold(step: str, config: Sm90Config, start: Sm90Config, sizes: Sizes) -> list[Step]:
        """A single row's change is folded in the product, unless K is in parts."""
        if batch.tokens == 1 and config.parts == 1:
            shrinks = [one | {"step": f"{step} shrink"} for one in _fold(step, job, batch, arch)[:1]]
            return [*shrinks, product(step, config, start, sizes)]
        return [product(step, config, start, sizes), *_fold(step, job, batch, arch)]

    steps = [
        *_plan(batch, found.gate_up.block_t),
        *_order("x", job.gate_up, "kernels/grouped/sm90/reorder"),
        *_rounded("x", job),
        *with_fold("gate_up", found.gate_up, row.gate_up, gate_up),
        *_rounded("h", job),
        *with_fold("down", found.down, row.down, down),
        _sum(batch),
    ]
    layer = shape.num_experts, batch.top_k, shape.hidden, shape.intermediate
    same = layer == (row.experts, row.top_k, row.hidden, row.intermediate)
    measured = (
        same
        and alone
        and job.activation_format == PLAIN
        and row.tokens == batch.tokens
        and (found.gate_up, found.down) == (row.gate_up, row.down)
        and _as_measured(job, row.format)
    )
    table = _row(row, row.header) | {"run": row.run, "same_layer": same}
    return Launches(steps, table, dict(row.us) if measured else None)


def gpu_of(arch: str) -> str | None:
    """The name of this machine's GPU, where it is of that arch; its own tables come first then."""
    if not torch.cuda.is_available() or arch_of(torch.device("cuda")) != arch:
        return None
    return torch.cuda.get_device_name()


def _row(row: object, header: Header) -> dict[str, Any]:
    """What a row is for, and where and when it was measured."""
    names = ("format", *SIZES)
    about = {"table": header.path.name, "path": str(header.path), "gpu": header.gpu, "measured": header.measured}
    return {name: getattr(row, name) for name in names} | about


_LAUNCHES: dict[str | None, Callable[[LayerJob, Batch, int], Launches]] = {
    "grouped": _grouped,
    "grouped_int4_sm90": _grouped_int4_sm90,
}


def _as_measured(job: LayerJob, family: str) -> bool:
    """Whether the table's times were measured with such weights."""
    integers = family == "int4"
    return job.shape.gated and all(
        (fmt.group_size == GROUP_MEASURED and not fmt.act_order) if integers else fmt.kind == family
        for fmt in (job.gate_up, job.down)
    )


def _plan(batch: Batch, block_t: int) -> list[Step]:
    """Rows in expert order, and with many rows those of each adapter; a single token needs none."""
    if batch.tokens == 1:
        return []
    steps = [_step("plan", "routing/plan", f"t{block_t}", {"block_t": block_t})]
    if batch.adapters and not _few(batch):
        steps.append(_step("adapter plan", "kernels/lora/plan"))
    return steps


def _few(batch: Batch) -> bool:
    """Whether rows are folded one by one."""
    return batch.tokens == 1 or batch.rows <= FEW_ROWS


def _order(what: str, fmt: WeightFormat, kernel: str) -> list[Step]:
    return [_step(f"order of {what}", kernel)] if fmt.act_order else []


def _rounded(what: str, job: LayerJob) -> list[Step]:
    """The activations of a product in another format; scales that the checkpoint lacks cost a few launches more."""
    kernels = {"nvfp4": "kernels/nvfp4/round", "fp8": "kernels/grouped/quantize"}
    name = job.activation_format
    return [] if name == PLAIN else [_step(f"{what} to {name}", kernels[name])]


def _fold(step: str, job: LayerJob, batch: Batch, arch: int) -> list[Step]:
    """The adapters of a product: one launch, or two where the rank is large."""
    if not batch.adapters:
        return []
    tile = GATHER_TILE if _few(batch) else row_tile(batch.rows, job.shape.num_experts, batch.adapters)
    config = fold_config_for(batch.rank, tile, job.dtype, arch)
    name = f"t{tile}-r{config.block_r}-k{config.block_k}-n{config.block_n}-w{config.num_warps}-s{config.num_stages}"
    settings = asdict(config) | {"tile": tile}
    names = ["fold"] if takes_one_launch(batch.rank) else ["shrink", "expand"]
    return [_step(f"{step} {one}", "kernels/lora", name, settings) for one in names]


def _sum(batch: Batch) -> Step:
    block = columns(batch.tokens)
    return _step("sum", "kernels/combine", f"n{block}", {"columns": block})


def _step(
    step: str,
    kernel: str,
    config: str | None = None,
    settings: dict[str, Any] | None = None,
    source: str | None = None,
    changed: list[str] | None = None,
) -> Step:
    return {
        "step": step,
        "kernel": kernel,
        "config": config,
        "settings": settings or {},
        "from": source,
        "changed": changed or [],
    }
