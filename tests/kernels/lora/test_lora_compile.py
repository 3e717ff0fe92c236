"""Kernels of the fold compile without spills, in matrix units, and their operands in flight are left alone.

`python tests/kernels/lora/test_lora_compile.py` (with tests and src on PYTHONPATH) writes lora_resources.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiling import Resources, check_fits, compile_launch
from fanfold.kernels.lora.sizes import padded_rank
from fanfold.kernels.lora.table import new_table
from fanfold.spec import Activation, AdapterRows, AdapterTable, AdapterWork, Route

MANIFEST = Path(__file__).with_name("lora_resources.json")
H, I, SLOTS, TOP_K, R = 2048, 768, 4, 8, 4096  # noqa: E741
SILU = Activation("silu")


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def work(tile: int) -> AdapterWork:
    return AdapterWork(int32(999, 4), int32(R), int32(R), TOP_K, SLOTS, tile)


def rows(number: int) -> AdapterRows:
    return AdapterRows(int32(number), int32(number // TOP_K), TOP_K, int32(number))


def table(projections: int, rank: int) -> AdapterTable:
    k, n = (H, I) if projections == 2 else (I, H)
    return new_table(projections, SLOTS, 8, k=k, n=n, max_rank=rank, dtype=torch.bfloat16, device="cpu")


def values(number: int, columns: int) -> Tensor:
    return torch.zeros(number, columns, dtype=torch.bfloat16)


def fold(
    source: Any,
    projections: int,
    rank: int,
    activation: Activation | None,
    arch: int,
    chained: bool = False,
    parts: int = 1,
) -> tuple[Any, dict[str, Any]]:
    from fanfold.kernels.lora import launch, product

    number = launch.row_count(source)
    x = values(number // TOP_K if projections == 2 else number, H if projections == 2 else I)
    y = values(number, 2 * I) if projections == 2 else values(number, H)
    if parts > 1:
        y = torch.zeros(parts, number, H)
    out = y if activation is None else values(number, I)
    pairs, gather = table(projections, rank), projections == 2
    arguments = launch.fold_arguments(y, out, x, pairs, source, gather, False, activation, None, chained, arch)
    return product.fold_kernel, arguments


def two_launches(expand: bool, arch: int) -> tuple[Any, dict[str, Any]]:
    from fanfold.kernels.lora import launch, product

    pairs, source, xa = table(2, 512), work(16), torch.zeros(2, R, padded_rank(512), dtype=torch.bfloat16)
    if expand:
        y = values(R, 2 * I)
        out = values(R, I)
        return product.expand_kernel, launch.expand_arguments(y, out, pairs, source, xa, 0, R, False, SILU, False, arch)
    x = values(R // TOP_K, H)
    return product.shrink_kernel, launch.shrink_arguments(x, pairs, source, xa, True, 0, R, None, False, arch)


def order(arch: int) -> tuple[Any, dict[str, Any]]:
    from fanfold.kernels.lora import plan

    many = 131072
    route = Route(int32(129), int32(many), int32(many), TOP_K)
    made = AdapterWork(int32(999, 4), int32(many), int32(many), TOP_K, SLOTS, 16)
    return plan.order_kernel, plan.order_arguments(route, int32(many // TOP_K), made, -1, int32(1), arch >= 90)


CASES: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "gate_up, tile 8": lambda arch: fold(work(8), 2, 16, None, arch),
    "gate_up, tile 16, rank 32": lambda arch: fold(work(16), 2, 32, None, arch),
    "gate_up with SiLU, tile 16": lambda arch: fold(work(16), 2, 16, SILU, arch),
    "gate_up with SiLU, tile 8, chained": lambda arch: fold(work(8), 2, 16, SILU, arch, chained=True),
    "gate_up with SiLU, one token": lambda arch: fold(rows(8), 2, 16, SILU, arch),
    "down, tile 16": lambda arch: fold(work(16), 1, 16, None, arch),
    "down in 4 parts, one token": lambda arch: fold(rows(8), 1, 16, None, arch, parts=4),
    "shrink, rank 512": lambda arch: two_launches(False, arch),
    "expand with SiLU, rank 512": lambda arch: two_launches(True, arch),
    "order, 16384 tokens": order,
}
ELSEWHERE = "gate_up, tile 16, rank 32"  # takes most registers and shared memory


def compiled(case: str, arch: str) -> Resources:
    kernel, arguments = CASES[case](int(arch.removeprefix("sm_")))
    return compile_launch(kernel, arguments, arch)


@pytest.mark.parametrize("case", CASES)
def test_hopper(case: str) -> None:
    resources = compiled(case, "sm_90")
    check_fits(resources, "sm_90")
    assert resources.hazards == ()
    assert resources.has_product("HMMA") is (not case.startswith("order"))
    assert not resources.has_product("HGMMA"), "the bits of a row would depend on the tile"
    manifest = json.loads(MANIFEST.read_text())
    if manifest["triton"] == version("triton"):
        assert [resources.registers, resources.shared] == manifest["sm_90"][case]


@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_elsewhere(arch: str) -> None:
    check_fits(compiled(ELSEWHERE, arch), arch)


def write_manifest() -> None:
    found = {case: compiled(case, "sm_90") for case in CASES}
    rows_of = {case: [used.registers, used.shared] for case, used in found.items()}
    MANIFEST.write_text(json.dumps({"triton": version("triton"), "sm_90": rows_of}, indent=1) + "\n")


if __name__ == "__main__":
    write_manifest()
