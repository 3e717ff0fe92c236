"""Sizes, grids, windows and packing of tables in C: the numbers of the Python functions, on random inputs."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from export_cases import NEEDS_GCC, Error, as_compiled, build, write_export

from fanfold.errors import ArgumentError
from fanfold.export.plan import plan
from fanfold.export.words import number
from fanfold.kernels.grouped.configs import config_for
from fanfold.kernels.lora import sizes
from fanfold.kernels.lora.config import takes_one_launch as fold_takes_one_launch
from fanfold.kernels.lora.table import Entry, pack_entries
from fanfold.routing.plan import plan_chunk, takes_one_launch
from fanfold.routing.sizes import block_count, work_slots
from fanfold.spec.weight_format import WeightFormat

pytestmark = NEEDS_GCC
TIMES = 400


class PackedEntry(ctypes.Structure):
    _fields_ = (
        *(("expert", ctypes.c_int64), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)),
        *(("scale", ctypes.c_float), ("rank", ctypes.c_int32)),
    )


class Library:
    """Functions that take and give whole numbers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def __call__(self, name: str, *arguments: int) -> int:
        function = self.library[f"fanfold_{name}"]
        function.restype = ctypes.c_int if "takes" in name else ctypes.c_int64
        return function(*map(ctypes.c_int64, arguments))

    def grid(self, name: str, *arguments: Any) -> tuple[int, int]:
        found = (ctypes.c_int64 * 2)()
        numbers = [ctypes.c_int64(a) if isinstance(a, int) else a for a in arguments]
        self.library[f"fanfold_{name}"](*numbers, found)
        return found[0], found[1]

    def windows(self, rows: int, cap: int) -> Iterator[tuple[int, int]]:
        first, end, error = ctypes.c_int64(), ctypes.c_int64(), Error()
        for index in range(rows + 2):
            arguments = *map(ctypes.c_int64, (rows, cap, index)), ctypes.byref(first), ctypes.byref(end)
            if self.library.fanfold_window(*arguments, ctypes.byref(error)) != 0:
                raise AssertionError(error.text)
            if first.value >= end.value:
                return
            yield first.value, end.value


@pytest.fixture(scope="module")
def c(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("sizes")
    write_export(folder, [as_compiled(kernel) for kernel in plan([90], ["activate"])])
    return Library(ctypes.CDLL(str(build(folder))))


def inputs() -> Iterator[tuple[int, int, int, int, int]]:
    """Rows, experts, adapter slots, columns and block, from few to more than models have."""
    chance = random.Random(80)
    for i in range(TIMES):
        rows = chance.choice([0, 1, chance.randrange(64), chance.randrange(4096), chance.randrange(2**24)])
        experts = chance.choice([1, 2, 8, 60, 128, 512, chance.randrange(1, 5000)])
        yield rows, experts, chance.randrange(1, 300), chance.randrange(1, 20000), 1 << (i % 9)


def test_sizes(c: Library) -> None:
    for rows, experts, slots, columns, block in inputs():
        tile = (8, 16, 32, 64, 128)[rows % 5]
        assert c("work_slots", rows, experts, tile) == work_slots(rows, experts, tile)
        assert c("block_count", rows, experts, tile) == block_count(rows, experts, tile)
        assert c("row_tile", rows, experts, slots) == sizes.row_tile(rows, experts, slots)
        assert c("work_items", rows, experts, slots, tile) == sizes.work_items(rows, experts, slots, tile)
        assert c("row_to_token", rows, block) == sizes.row_to_token(rows, block)
        assert c("padded_rank", columns) == sizes.padded_rank(columns)
        assert c("plan_takes_one_launch", rows, experts) == takes_one_launch(rows, experts)
        assert c("plan_chunks", rows) == -(-rows // plan_chunk(rows))
        assert c.grid("worst_case_grid", rows, experts, slots, tile, columns, block) == sizes.worst_case_grid(
            rows, experts, slots, tile, columns, block
        )
        assert c.grid("gather_grid", rows, columns, block) == sizes.gather_grid(rows, columns, block)
    assert [rank for rank in range(1, 513) if c("fold_takes_one_launch", rank) != fold_takes_one_launch(rank)] == []
    assert c("block_count", 5, 0, 16) == block_count(5, 0, 16) == 0


def test_the_tile_of_a_product_is_that_of_its_config(c: Library) -> None:
    fmt = WeightFormat.parse("gptq4-g128")
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    near = [(rows, experts, 0, 0, 0) for experts in (1, 3, 128) for most in (8, 24, 40)
            for rows in (most * experts - 1, most * experts, most * experts + 1)]  # fmt: skip
    for rows, experts, *_ in [*inputs(), *near]:
        for name, dtype in dtypes.items():
            for arch in (80, 90):
                wanted = config_for(fmt, 2048, dtype, arch, rows, experts).block_t
                assert c("product_tile", number("dtype", name), rows, experts) == wanted, (rows, experts, name)


def test_exact_grids(c: Library) -> None:
    chance = random.Random(81)
    for pairs in (0, 1, 7, 300):
        rows = [chance.randrange(200) for _ in range(pairs)]
        given = (ctypes.c_int64 * max(pairs, 1))(*rows)
        for tile, columns, block in ((8, 768, 128), (16, 100, 64)):
            assert c.grid("exact_grid", given, pairs, tile, columns, block) == sizes.exact_grid(
                rows, tile, columns, block
            )


def test_windows(c: Library) -> None:
    for rows, cap in ((0, 4), (1, 1), (7, 3), (9, 3), (100, 1000), (64, 64)):
        assert list(c.windows(rows, cap)) == list(sizes.windows(rows, cap))
    with pytest.raises(ArgumentError, match="cap: found 0"):
        sizes.windows(5, 0)
    with pytest.raises(AssertionError, match="cap: found 0, expected at least 1 row"):
        list(c.windows(5, 0))


def packed(c: Library, entries: list[Entry], room: int = 64) -> tuple[int, list[list[Any]], str]:
    """Status, the four arrays up to their length, and the message."""
    given = (PackedEntry * max(len(entries), 1))(*[(e.expert, e.a, e.b, e.scale, e.rank) for e in entries])
    kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_float, ctypes.c_int32)
    arrays = [(kind * 64)(*[9] * 64) for kind in kinds]
    length, error = ctypes.c_int64(), Error()
    count, capacity = ctypes.c_int64(len(entries)), ctypes.c_int64(room)
    status = c.library.fanfold_pack_entries(given, count, capacity, *arrays, ctypes.byref(length), ctypes.byref(error))
    return status, [list(array[: length.value]) for array in arrays], error.text


def test_packing_of_tables(c: Library) -> None:
    chance = random.Random(82)
    for pairs in (0, 1, 5, 40):
        entries = [
            Entry(chance.randrange(60), chance.randrange(2**62), chance.randrange(2**62), chance.randrange(99) / 8,
                  chance.randrange(1, 513))
            for _ in range(pairs)
        ]  # fmt: skip
        wanted = pack_entries(entries)
        status, found, _ = packed(c, entries)
        assert status == 0
        assert found == ([[]] * 4 if wanted is None else [wanted.a, wanted.b, wanted.scale, wanted.rank])
    twice = [Entry(3, 1, 2, 0.5, 8), Entry(3, 3, 4, 0.25, 16)]
    assert packed(c, twice)[1] == [[0, 0, 0, 3], [0, 0, 0, 4], [0.0, 0.0, 0.0, 0.25], [0, 0, 0, 16]]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry(-1, 1, 2, 1.0, 8), "found expert -1, rank 8"),
        (Entry(0, 1, 2, 1.0, 0), "found expert 0, rank 0"),
        (Entry(0, 1, 2, 1.0, 513), "found expert 0, rank 513"),
    ],
)
def test_entries_that_no_table_holds(c: Library, entry: Entry, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        pack_entries([entry])
    status, _, found = packed(c, [entry])
    assert status == 1
    assert message in found


def test_tables_without_room(c: Library) -> None:
    status, _, message = packed(c, [Entry(5, 1, 2, 1.0, 8)], room=5)
    assert (status, "found room for 5 experts, expected 6" in message) == (1, True)
