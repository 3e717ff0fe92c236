"""Kernels of the fold compile for every arch without spills, and use the matrix instructions whose bits are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product as product_of
from typing import Any

import torch
from torch import Tensor

from compiling import ALL_ARCHS, Resources, check_fits, compile_launch
from fanfold.kernels.lora.operands import Source, row_count
from fanfold.kernels.lora.sizes import FEW_ROWS, RANK_TILE, ROW_TILES, padded_rank
from fanfold.kernels.lora.table import new_table
from fanfold.spec import Activation, AdapterRows, AdapterTable, AdapterWork, Route

H, I, SLOTS, TOP_K, R = 2048, 768, 4, 8, 4096  # noqa: E741
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SILU = Activation("silu")
RANKS = (16, RANK_TILE, 512)
"""A padded rank of each config; the last takes two launches."""
Launch = tuple[Any, dict[str, Any]]


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def work(tile: int) -> AdapterWork:
    return AdapterWork(int32(999, 4), int32(R), int32(R), TOP_K, SLOTS, tile)


def rows(number: int, planned: bool) -> AdapterRows:
    return AdapterRows(int32(number), int32(number // TOP_K), TOP_K, int32(number) if planned else None)


SOURCES: dict[str, Source] = {
    **{f"tile {tile}": work(tile) for tile in ROW_TILES},
    "one token": rows(TOP_K, planned=False),
    f"{FEW_ROWS} rows": rows(FEW_ROWS, planned=True),
}


def table(projections: int, rank: int, dtype: torch.dtype) -> AdapterTable:
    k, n = (H, I) if projections == 2 else (I, H)
    return new_table(projections, SLOTS, 8, k=k, n=n, max_rank=rank, dtype=dtype, device="cpu")


def fold(
    source: Source,
    down: bool,
    rank: int,
    arch: int,
    activation: Activation | None = SILU,
    chained: bool = False,
    parts: int = 1,
    dtype: torch.dtype = BF16,
) -> dict[str, Launch]:
    """Launches of gate_up or down, by the end of their name: one, or two where the rank takes more programs."""
    from fanfold.kernels.lora import launch, product

    number, gather, scatter = row_count(source), not down, down and source is not SOURCES["one token"]
    x = torch.zeros((number, I) if down else (number // TOP_K, H), dtype=dtype)
    y = torch.zeros(number, H if down else 2 * I, dtype=dtype)
    if parts > 1:
        y = torch.zeros(parts, number, H)
    activation = None if down else activation
    out = y if activation is None else torch.zeros(number, I, dtype=dtype)
    pairs = table(1 if down else 2, rank, dtype)
    unknown = None if down or isinstance(source, AdapterWork) else int32(1)
    if launch.takes_one_launch(rank):
        arguments = launch.fold_arguments(y, out, x, pairs, source, gather, scatter, activation, unknown, chained, arch)
        return {"": (product.fold_kernel, arguments)}
    xa = torch.zeros(pairs.projections, number, padded_rank(rank), dtype=dtype)
    first = launch.shrink_arguments(x, pairs, source, xa, gather, 0, number, unknown, chained, arch)
    second = launch.expand_arguments(y, out, pairs, source, xa, 0, number, scatter, activation, chained, arch)
    return {"": (product.shrink_kernel, first), " ": (product.expand_kernel, second)}


def order(tokens: int, slots: int, arch: int) -> Launch:
    from fanfold.kernels.lora import plan

    many = tokens * TOP_K
    route = Route(int32(129), int32(many), int32(many), TOP_K)
    made = AdapterWork(int32(999, 4), int32(many), int32(many), TOP_K, slots, ROW_TILES[-1])
    return plan.order_kernel, plan.order_arguments(route, int32(tokens), made, -1, int32(1), arch >= 90)


def of_layers(arch: int) -> Iterator[tuple[str, Launch]]:
    """What layers launch; gate_up starts beside the order of rows where it can.

    Every rank and kind of rows on sm_90, elsewhere large tiles and a single token.
    """
    for rank, (name, source), down in product_of(RANKS, SOURCES.items(), (False, True)):
        if arch != 90 and name not in ("tile 16", "one token"):
            continue
        chained = arch >= 90 and not down and isinstance(source, AdapterWork)
        for launch in fold(source, down, rank, arch, chained=chained).values():
            yield f"{'down' if down else 'gate_up'}, rank {rank}, {name}{', chained' if chained else ''}", launch
    for tokens, slots in ((128, 4), (2048, 4), (16384, 4), (16384, 300)):
        yield f"order, {tokens} tokens, {slots} slots", order(tokens, slots, arch)


def others(arch: int) -> Iterator[tuple[str, Launch]]:
    """Without an activation, down in parts, other dtypes and activations."""
    made: dict[str, Callable[[], dict[str, Launch]]] = {
        "gate_up, no activation, tile 8": lambda: fold(work(8), False, 16, arch, None),
        "gate_up, no activation, rank 32, tile 16": lambda: fold(work(16), False, 32, arch, None),
        "gate_up, gelu_tanh": lambda: fold(work(16), False, 32, arch, Activation("gelu_tanh")),
        "gate_up, clamped_swiglu": lambda: fold(work(16), False, 32, arch, Activation("clamped_swiglu")),
        "down in 4 parts, one token": lambda: fold(SOURCES["one token"], True, 16, arch, parts=4),
        "down in 4 parts, rank 32, tile 16": lambda: fold(work(16), True, 32, arch, parts=4),
        "gate_up, fp16": lambda: fold(work(16), False, 32, arch, dtype=FP16),
        "down, fp16": lambda: fold(work(16), True, 32, arch, dtype=FP16),
    }
    for name, launches in made.items():
        for launch in launches().values():
            yield name, launch


def compiled(case: str, launch: Launch, arch: str) -> Resources:
    kernel, arguments = launch
    return compile_launch(kernel, arguments, arch, case, disassemble=arch == "sm_90")


@ALL_ARCHS
def test_what_layers_launch(arch: str) -> None:
    found = [compiled(case, launch, arch) for case, launch in of_layers(int(arch.removeprefix("sm_")))]
    assert len(found) == (4 if arch == "sm_90" else 2) * 2 * (1 + 1 + 2) + 4
    for resources in found:
        check_fits(resources, arch)
        if arch == "sm_90":
            check_products(resources)


def test_what_else_can_be_launched() -> None:
    """On one arch: these differ from the others in single lines."""
    for case, launch in others(90):
        resources = compiled(case, launch, "sm_90")
        check_fits(resources, "sm_90")
        check_products(resources)


@ALL_ARCHS
def test_fp32(arch: str) -> None:
    """Without matrix units."""
    for tile, down in product_of(ROW_TILES, (False, True)):
        (launch,) = fold(work(tile), down, 32, int(arch.removeprefix("sm_")), dtype=FP32).values()
        resources = compiled(f"{'down' if down else 'gate_up'}, fp32, tile {tile}", launch, arch)
        check_fits(resources, arch)
        assert resources.products == ()


def check_products(resources: Resources) -> None:
    assert resources.hazards == (), resources
    assert resources.has_product("HMMA") is ("order" not in resources.case), resources
    assert not resources.has_product("HGMMA"), f"the bits of a row would depend on the tile: {resources}"
