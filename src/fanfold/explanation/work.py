"""Work: what a layer reads and computes, and how long that takes at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fanfold.formats.codec import shapes
from fanfold.spec.arch import Arch
from fanfold.spec.job import LayerJob
from fanfold.spec.lora import padded_rank
from fanfold.spec.weight_format import WeightFormat


@dataclass(frozen=True)
class Batch:
    """What a layer is called with.

    Attributes:
        tokens: T.
        top_k: k.
        adapters: how many the batch has; every token has one. 0: none.
        rank: of the adapters, on gate, up and down of every expert.
    """

    tokens: int
    top_k: int
    adapters: int
    rank: int

    @property
    def rows(self) -> int:
        """R."""
        return self.tokens * self.top_k

    def met(self, things: int) -> tuple[int, float]:
        """How many of these (experts, or each adapter's experts) the rows meet: at most, and the mean if uniform."""
        if not things:
            return 0, 0.0
        return min(things, self.rows), things * (1 - (1 - min(1.0, self.top_k / things)) ** self.tokens)


def work(job: LayerJob, batch: Batch, rates: Arch | None) -> dict[str, Any]:
    """Bytes and operations by part, their sums, and the floor."""
    shape, rows, width = job.shape, batch.rows, job.dtype.itemsize
    matrices = {
        "gate_up": shape.halves * matrix_bytes(job.gate_up, shape.intermediate, shape.hidden),
        "down": matrix_bytes(job.down, shape.hidden, shape.intermediate),
    }
    pair = (shape.halves + 1) * (shape.hidden + shape.intermediate)
    pair_bytes = pair * padded_rank(batch.rank) * width
    flops = {
        "gate_up": 2 * rows * shape.halves * shape.hidden * shape.intermediate,
        "down": 2 * rows * shape.hidden * shape.intermediate,
        "pairs": 2 * rows * pair * batch.rank if batch.adapters else 0,
    }
    total = sum(flops.values())
    experts, uniform_experts = batch.met(shape.num_experts)
    pairs, uniform_pairs = batch.met(shape.num_experts * batch.adapters)
    one_expert = sum(matrices.values())
    read = {name: experts * size for name, size in matrices.items()} | {"pairs": pairs * pair_bytes}
    uniform_read = uniform_experts * one_expert + uniform_pairs * pair_bytes
    parts = {name: {"bytes": read[name], "flops": flops[name]} for name in read}
    parts["activations"] = {"bytes": activation_bytes(job, batch), "flops": 0}
    if not batch.adapters:
        del parts["pairs"]
    return {
        "parts": parts,
        "weight_bytes": experts * one_expert,
        "pair_bytes": read["pairs"],
        "flops": total,
        "floor_us": floor_us(sum(read.values()), total, rates),
        "floor_of": None if rates is None else rates.name,
        "uniform": {
            "experts": uniform_experts,
            "bytes": uniform_read,
            "floor_us": floor_us(uniform_read, total, rates),
        },
    }


def floor_us(read_bytes: float, flops: int, rates: Arch | None) -> float | None:
    """The longer of reading and computing, at the device's rates."""
    return None if rates is None else max(read_bytes / rates.read_bytes, flops / rates.matrix_flops) * 1e6


def activation_bytes(job: LayerJob, batch: Batch) -> int:
    """Hidden states, h, y2 and the result, each written and read as often as the steps do; y1 too with adapters."""
    shape, rows = job.shape, batch.rows
    numbers = 2 * batch.tokens * shape.hidden + 2 * rows * shape.intermediate + 2 * rows * shape.hidden
    if batch.adapters:
        numbers += 2 * shape.halves * rows * shape.intermediate
    return numbers * job.dtype.itemsize


def matrix_bytes(fmt: WeightFormat, n: int, k: int) -> int:
    """Bytes of one packed W [N, K], at least: scales in the smallest dtype they occur in, zero points where needed."""
    total = 0
    for field in shapes(fmt, n, k).values():
        if field.required:
            count = 1
            for size in field.shape:
                count *= size
            total += count * min(dtype.itemsize for dtype in field.dtypes)
    return total
