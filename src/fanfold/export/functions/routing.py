"""The plan of a batch: one launch for up to 4096 rows (fewer with more than 512 experts), else two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fanfold.export.description import Buffer, Check, Choice, Function, Kernel, Need, Size, Value
from fanfold.export.functions.example import empty
from fanfold.routing.plan import (
    COUNT_BLOCK,
    ONE_LAUNCH_READS,
    ONE_LAUNCH_ROWS,
    place_block,
    plan_warps,
)

TILES = (16, 32, 64, 128)
"""Of the products."""
BLOCKS = (128, 256, 512, 1024, 2048, 4096)
"""Every value of `plan_block`."""
CHUNKS = (256, 512, 1024, 2048)
"""Every value of `plan_chunk`."""
BINS = (32, 64, 128, 256, 512)
"""Experts of a second launch, rounded up; `BINS[-1]` is the largest number exported."""
ROWS, EXPERTS = 1001, 101
"""Of the launch that is compiled: numbers that the compiler learns nothing from."""
SIZES = (Size("tokens", "T"), Size("top_k", "k", 1), Size("experts", "E"))
TILE = Choice("tile", "rows of a slot of the work list: that of the product which reads it")
IDS = Buffer("topk_ids", "expert of each row, [T, k]; rows of ids outside [0, E) come last, and are in no slot")
OUT = (
    Buffer("expert_offsets", "prefix sum of rows, [E + 1]", written=True),
    Buffer("sorted_rows", "sorted position -> row = token * k + slot, [R]", written=True),
    Buffer("positions", "row -> sorted position, [R]", written=True),
    Buffer("work", "slots of (expert or -1, first sorted position, rows, 0), [R // tile + E, 4]", written=True),
)
DERIVED = (("rows", "tokens * top_k"), ("slots", "rows // tile + experts"))
BINS_OF = "max(32, power_of_two(experts))"
CHUNK_OF = "min(2048, max(256, power_of_two(ceil_div(rows, 128))))"
CHUNKS_OF = ("chunks", f"ceil_div(rows, {CHUNK_OF})")
COUNTS = "rows of each expert in each chunk of rows, [chunks, E]; fanfold_plan_chunks says how many chunks"

SORT = Function(
    op="plan_sort",
    name="plan_sort",
    meaning="rows in expert order and the work list, in one launch",
    sizes=SIZES,
    buffers=(IDS, *OUT),
    choices=(TILE, Choice("block", "rows read at once", "min(4096, max(128, power_of_two(rows)))")),
    derived=DERIVED,
    checks=(
        Check("rows", str(ONE_LAUNCH_ROWS), "rows of one launch (use plan_count and plan_place of plan_sort_many)"),
        Check("rows * experts", str(ONE_LAUNCH_READS), "rows times experts of one launch (use plan_sort_many)"),
    ),
)
COUNT = Function(
    op="plan_sort_many",
    name="plan_count",
    meaning="the first of two launches of a plan of many rows: rows of each expert by chunk",
    sizes=SIZES,
    buffers=(IDS, Buffer("counts", COUNTS, written=True)),
    choices=(Choice("bins", "experts, rounded up", BINS_OF), Choice("chunk", "rows of a chunk", CHUNK_OF)),
    derived=(DERIVED[0], CHUNKS_OF),
)
PLACE = Function(
    op="plan_sort_many",
    name="plan_place",
    meaning="the second: what plan_sort writes",
    sizes=SIZES,
    buffers=(IDS, Buffer("counts", COUNTS), *OUT),
    choices=(TILE, *COUNT.choices),
    derived=(*DERIVED, CHUNKS_OF),
)
VALUES = {
    "ids_ptr": Value("topk_ids"),
    "counts_ptr": Value("counts"),
    "offsets_ptr": Value("expert_offsets"),
    "sorted_ptr": Value("sorted_rows"),
    "positions_ptr": Value("positions"),
    "work_ptr": Value("work"),
    "chunks": Value("chunks", "chunks of rows"),
    "R": Value("rows", "R"),
    "E": Value("experts", "E"),
}
NEEDS = {
    "topk_ids": Need("i32", ("tokens", "top_k")),
    "expert_offsets": Need("i32", ("experts + 1",)),
    "sorted_rows": Need("i32", ("rows",)),
    "positions": Need("i32", ("rows",)),
    "work": Need("i32", ("slots", "4")),
    "counts": Need("i32", ("chunks", "experts")),
}


def kernels(arch: str) -> Iterator[Kernel]:
    """Every kernel of a plan in one launch; ids are int32."""
    from fanfold.routing.plan_kernels import plan_kernel

    for tile in TILES:
        for block in BLOCKS:
            example = {**_shared(), **_outputs(), "TILE": tile, "BLOCK": block, "WORDS": False}
            example["num_warps"] = plan_warps(block)
            yield _kernel(SORT, arch, {"tile": tile, "block": block}, plan_kernel, example, "experts + 1")


def kernels_of_many(arch: str) -> Iterator[Kernel]:
    """Every kernel of a plan in two launches."""
    from fanfold.routing.plan_kernels import count_kernel, place_kernel

    for bins in BINS:
        for chunk in CHUNKS:
            shared = {**_shared(), "counts_ptr": empty(8, "i32"), "CHUNK": chunk, "BLOCK_E": bins, "num_warps": 8}
            choices = {"bins": bins, "chunk": chunk}
            yield _kernel(COUNT, arch, choices, count_kernel, {**shared, "BLOCK": COUNT_BLOCK}, "chunks")
            for tile in TILES:
                placing = {**shared, **_outputs(), "chunks": 101, "TILE": tile, "BLOCK_C": place_block(bins)}
                placing["WORDS"] = False
                yield _kernel(PLACE, arch, {"tile": tile, **choices}, place_kernel, placing, "chunks")


def _shared() -> dict[str, Any]:
    return {"ids_ptr": empty(8, "i32"), "R": ROWS, "E": EXPERTS}


def _outputs() -> dict[str, Any]:
    names = ("offsets_ptr", "sorted_ptr", "positions_ptr", "work_ptr")
    return {**dict.fromkeys(names, empty(8, "i32")), "rows_ptr": None}


def _kernel(
    function: Function,
    arch: str,
    choices: Mapping[str, str | int],
    kernel: Any,
    example: Mapping[str, Any],
    programs: str,
) -> Kernel:
    needs = {buffer.name: NEEDS[buffer.name] for buffer in function.buffers}
    config = "-".join(f"{name}{value}" for name, value in choices.items())
    return Kernel(function, arch, choices, kernel, example, VALUES, needs, (programs, "1", "1"), config)
