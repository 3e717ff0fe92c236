"""explain: what would run, why, and how fast it could be at best."""

from __future__ import annotations

from typing import Any, cast

import torch

from fanfold.errors import ArgumentError
from fanfold.formats.codec import shapes
from fanfold.select import arch_name, verdicts
from fanfold.spec.arch import ARCHS
from fanfold.spec.job import LayerJob
from fanfold.spec.shape import ExpertShape
from fanfold.spec.verdict import Accepted, Rejected
from fanfold.spec.weight_format import WeightFormat


def explain(
    shape: ExpertShape | tuple[int, int, int],
    format: WeightFormat | str,
    arch: int | str,
    rows: int,
) -> dict[str, Any]:
    """The implementation that runs a layer, the ones that don't and why, bytes, flops and the floor.

    Activations are bf16; between gate_up and down is SiLU (relu2 without a gate).

    Args:
        shape: the layer's sizes, or (num_experts, hidden, intermediate).
        format: of gate_up and down, or its name, e.g. `gptq4-g128`.
        arch: "cpu", or a compute capability such as 90.
        rows: (token, expert) pairs, T * top_k.

    Returns:
        `chosen` (a name or None), `rejected` (name -> reason), `weight_bytes` (of the experts that `rows` rows meet at
        most), `flops` (multiplications and additions of the products), `floor_us` (max of the two over the device's
        rates; None where its rates are not known) and what was asked.

    Raises:
        ArgumentError: rows < 0, an unknown arch, or sizes that are none.
        UnsupportedError: a format of another name, or that can't hold such sizes.
    """
    shape = shape if isinstance(shape, ExpertShape) else _shape(shape)
    fmt = format if isinstance(format, WeightFormat) else WeightFormat.parse(format)
    name = arch_name(arch)
    if rows < 0:
        raise ArgumentError("rows", found=str(rows), expected="0 or more", next_step="Pass tokens * top_k.")
    activation = "silu" if shape.gated else "relu2"
    found = verdicts(LayerJob(shape, fmt, fmt, activation, torch.bfloat16), name)
    experts = min(shape.num_experts, rows)
    bytes_read = experts * (
        shape.halves * matrix_bytes(fmt, shape.intermediate, shape.hidden)
        + matrix_bytes(fmt, shape.hidden, shape.intermediate)
    )
    flops = 2 * rows * (shape.halves + 1) * shape.hidden * shape.intermediate
    rates = ARCHS.get(name)
    floor = None if rates is None else max(bytes_read / rates.read_bytes, flops / rates.matrix_flops) * 1e6
    return {
        "shape": {
            "num_experts": shape.num_experts,
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
        },
        "format": fmt.name,
        "arch": name,
        "rows": rows,
        "chosen": next((verdict.kernel for verdict in found if isinstance(verdict, Accepted)), None),
        "rejected": {verdict.kernel: verdict.reason for verdict in found if isinstance(verdict, Rejected)},
        "weight_bytes": bytes_read,
        "flops": flops,
        "floor_us": floor,
        "floor_of": None if rates is None else rates.name,
    }


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
