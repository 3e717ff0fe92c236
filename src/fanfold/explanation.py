"""explain: what would run, why, and how fast it could be at best."""

from __future__ import annotations

from typing import Any

from fanfold.errors import ArgumentError
from fanfold.formats.codec import shapes
from fanfold.select import arch_name, verdicts
from fanfold.spec.arch import ARCHS
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
        ArgumentError: rows < 0, or an unknown arch.
        UnsupportedError: a format of another name, or that can't hold such sizes.
    """
    shape = shape if isinstance(shape, ExpertShape) else ExpertShape(*shape)
    fmt = format if isinstance(format, WeightFormat) else WeightFormat.parse(format)
    name = arch_name(arch)
    if rows < 0:
        raise ArgumentError("rows", found=str(rows), expected="0 or more", next_step="Pass tokens * top_k.")
    found = verdicts(name)
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


def matrix_bytes(fmt: WeightFormat, n: int, k: int) -> int:
    """Bytes of one packed W [N, K]; symmetric integers keep no zero points."""
    total = 0
    for field in shapes(fmt, n, k).values():
        if field.required:
            count = 1
            for size in field.shape:
                count *= size
            total += count * field.dtypes[0].itemsize
    return total
