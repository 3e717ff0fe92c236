"""The kernels of the fold: projections, activations, where rows come from, and columns of the rank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product as product_of
from typing import Any

from fanfold.export.description import Function, Kernel, Need, Value
from fanfold.export.functions.example import empty, torch_dtype
from fanfold.export.functions.lora import EXPAND, FOLD, ORDER, SHRINK
from fanfold.kernels.lora.config import GATHER_TILE
from fanfold.kernels.lora.sizes import RANK_TILE, ROW_TILES
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import AdapterRows, AdapterTable, AdapterWork
from fanfold.spec.route import Route

TOKENS, TOP_K, SLOTS, EXPERTS, N, K, RANK = 9, 3, 5, 7, 384, 640, 24
"""Of the launch that is compiled: whatever is a multiple of 16 here must be one at run time, too."""
RANKS = (16, RANK_TILE)
"""Columns of the rank that a program holds."""
HALVES = {"gate_up": 2, "down": 1}
CHUNKS = (64, 128, 256, 512, 1024)
BINS = (32, 64, 128)
"""Slots and the base, rounded up; `BINS[-1]` less 2 is the largest number of slots exported."""
SOURCES = ((0, GATHER_TILE), (1, GATHER_TILE), *((2, tile) for tile in ROW_TILES))
"""(source, tile), as the functions name them."""
VALUES = {
    "x_ptr": Value("x"),
    "xa_ptr": Value("xa"),
    "y_ptr": Value("y"),
    "h_ptr": Value("h"),
    "unknown_ptr": Value("unknown"),
    "table.a": Value("table_a"),
    "table.b": Value("table_b"),
    "table.scale": Value("table_scale"),
    "table.rank": Value("table_rank"),
    "source.items": Value("items"),
    "source.positions": Value("places"),
    "source.rows": Value("rows_of_places"),
    "source.expert_ids": Value("topk_ids"),
    "source.adapter_ids": Value("adapter_ids"),
    "source.sorted_rows": Value("sorted_rows"),
    "source.one_slot": Value("-1", "not read"),
    "source.top_k": Value("top_k", "rows a token"),
    "parts": Value("parts", "programs that share an item"),
    "tiles": Value("tiles", "tiles of outputs that a program folds"),
    "top_k": Value("top_k", "rows a token"),
    "slots": Value("adapter_slots", "slots of the tables"),
    "experts": Value("table_experts", "experts of the tables"),
    "K": Value("inputs", "inputs of a pair"),
    "N": Value("outputs", "outputs of a pair"),
    "row_offset": Value("row_offset", "first position of the window"),
    "row_end": Value("row_end", "behind the last position of the window"),
    "stride_x": Value("inputs", "elements of x from row to row"),
    "stride_xa": Value("padded_rank", "elements of xa from row to row"),
    "stride_half": Value("cap * padded_rank", "elements of xa from gate to up"),
    "stride_part": Value("0", "not read"),
    "stride_h": Value("outputs", "elements of h from row to row"),
    "alpha": Value("0", "not read"),
    "limit": Value("0", "not read"),
}
ORDER_VALUES = {
    "offsets_ptr": Value("expert_offsets"),
    "sorted_ptr": Value("sorted_rows"),
    "adapter_ptr": Value("adapter_ids"),
    "items_ptr": Value("items"),
    "positions_ptr": Value("places"),
    "rows_ptr": Value("rows_of_places"),
    "unknown_ptr": Value("unknown"),
    "one_slot": Value("-1", "not read"),
    "R": Value("rows", "R"),
    "E": Value("experts", "E"),
    "total_items": Value("item_count", "items of the list"),
    "slots": Value("adapter_slots", "slots of the tables"),
    "top_k": Value("top_k", "rows a token"),
    "programs": Value("ceil_div(usual, chunk)", "programs that share an expert"),
}
ROWS = Need("i32", ("rows",))
ITEMS = Need("i32", ("item_count", "4"))
ONE = Need("i32", ("1",))


def order_kernels(arch: str) -> Iterator[Kernel]:
    """Every kernel that orders rows."""
    from fanfold.kernels.lora.plan import order_arguments, order_kernel

    rows = TOKENS * TOP_K
    route = Route(empty(EXPERTS + 1, "i32"), empty(rows, "i32"), empty(rows, "i32"), TOP_K)
    needs = {"expert_offsets": Need("i32", ("experts + 1",)), "adapter_ids": Need("i32", ("tokens",))}
    needs |= {
        "sorted_rows": ROWS,
        "places": ROWS,
        "rows_of_places": ROWS,
        "items": ITEMS,
        "unknown": Need("i32", ("1",)),
    }
    for tile, chunk, bins in product_of(ROW_TILES, CHUNKS, BINS):
        work = AdapterWork(empty(9, 4, "i32"), empty(rows, "i32"), empty(rows, "i32"), TOP_K, SLOTS, tile)
        example = order_arguments(route, empty(TOKENS, "i32"), work, -1, empty(1, "i32"), False)
        example |= {"CHUNK": chunk, "BLOCK_S": bins, "num_warps": max(1, chunk // 128)}
        choices: dict[str, str | int] = {"tile": tile, "chunk": chunk, "bins": bins}
        grid = ("experts + 1", "ceil_div(usual, chunk)", "1")
        name = f"t{tile}-c{chunk}-b{bins}"
        yield Kernel(ORDER, arch, choices, order_kernel, example, ORDER_VALUES, needs, grid, name)


def fold_kernels(arch: str, dtype: str) -> Iterator[Kernel]:
    """Every kernel that shrinks and expands in one."""
    from fanfold.kernels.lora.launch import fold_arguments
    from fanfold.kernels.lora.product import fold_kernel

    for projection, rank, (source, tile) in product_of(HALVES, RANKS, SOURCES):
        for activation, one_tile in product_of(_activations(projection), (0, 1)):
            x, y, h = _tensors(projection, dtype)
            gate_up = projection == "gate_up"
            example = fold_arguments(
                y, h if activation else y, x, _table(projection, dtype, rank), _source(source, tile), gate_up,
                not gate_up and source != 0, activation, _unknown(projection, source), False, _number(arch),
            )  # fmt: skip
            example["ONE_TILE"] = bool(one_tile)
            choices = _choices(dtype, projection, source, tile, rank, activation) | {"one_tile": one_tile}
            yield _kernel(FOLD, arch, choices, fold_kernel, example, ("item_count * parts", "1", "1"))


def shrink_kernels(arch: str, dtype: str) -> Iterator[Kernel]:
    """Every kernel that shrinks."""
    from fanfold.kernels.lora.launch import shrink_arguments
    from fanfold.kernels.lora.product import shrink_kernel

    for projection, rank, (source, tile) in product_of(HALVES, RANKS, SOURCES):
        x, _, _ = _tensors(projection, dtype)
        example = shrink_arguments(
            x, _table(projection, dtype, rank), _source(source, tile), _xa(projection, dtype),
            projection == "gate_up", 0, TOKENS * TOP_K, _unknown(projection, source), False, _number(arch),
        )  # fmt: skip
        choices = _choices(dtype, projection, source, tile, rank)
        yield _kernel(SHRINK, arch, choices, shrink_kernel, example, ("item_count * parts", "1", "1"))


def expand_kernels(arch: str, dtype: str) -> Iterator[Kernel]:
    """Every kernel that expands and folds."""
    from fanfold.kernels.lora.launch import expand_arguments
    from fanfold.kernels.lora.product import expand_kernel

    for projection, rank, (source, tile) in product_of(HALVES, RANKS, SOURCES):
        for activation in _activations(projection):
            _, y, h = _tensors(projection, dtype)
            example = expand_arguments(
                y, h if activation else y, _table(projection, dtype, rank), _source(source, tile),
                _xa(projection, dtype), 0, TOKENS * TOP_K, projection == "down" and source != 0, activation, False,
                _number(arch),
            )  # fmt: skip
            choices = _choices(dtype, projection, source, tile, rank, activation)
            parts = f"ceil_div(outputs, {example['BLOCK_N']})"
            values = {"parts": Value(parts, "programs that share an item")}
            yield _kernel(EXPAND, arch, choices, expand_kernel, example, (f"item_count * {parts}", "1", "1"), values)


def _kernel(
    function: Function,
    arch: str,
    choices: dict[str, str | int],
    kernel: Any,
    example: dict[str, Any],
    grid: tuple[str, str, str],
    values: dict[str, Value] | None = None,
) -> Kernel:
    halves = HALVES[str(choices["projection"])]
    with_h = choices.get("activation", "none") != "none"
    width = "outputs" if halves == 1 else "2 * outputs"
    found = VALUES | {"stride_y": Value(width, "elements of y from row to row")} | (values or {})
    if not with_h:
        found |= {"h_ptr": Value("y"), "stride_h": Value(width, "not read")}
    sizes = [
        f"{letter}{example[f'BLOCK_{letter.upper()}']}" for letter in "mrkn" if f"BLOCK_{letter.upper()}" in example
    ]
    config = "-".join([*sizes, f"w{example['num_warps']}"] + ([f"s{example['STAGES']}"] if "STAGES" in example else []))
    needs = _needs(
        function, choices, halves, width, with_h, "unknown_ptr" in example and example["unknown_ptr"] is not None
    )
    return Kernel(function, arch, choices, kernel, example, found, needs, grid, config)


def _needs(
    function: Function, choices: dict[str, str | int], halves: int, width: str, with_h: bool, with_unknown: bool
) -> dict[str, Need]:
    dtype, source = str(choices["dtype"]), choices["source"]
    of_table = (str(halves), "adapter_slots", "table_experts")
    found = {
        "x": Need(dtype, ("tokens" if halves == 2 else "rows", "inputs")),
        "xa": Need(dtype, (str(halves), "cap", "padded_rank")),
        "y": Need(dtype, ("rows", width)),
        "table_a": Need("u64", of_table),
        "table_b": Need("u64", of_table),
        "table_scale": Need("fp32", of_table),
        "table_rank": Need("i32", of_table),
    }
    found = {name: need for name, need in found.items() if name in {buffer.name for buffer in function.buffers}}
    found |= {"h": Need(dtype, ("rows", "outputs"))} if with_h else {}
    if source == 2:
        return found | {"items": ITEMS, "places": ROWS, "rows_of_places": ROWS}
    found |= {"topk_ids": Need("i32", ("tokens", "top_k")), "adapter_ids": Need("i32", ("tokens",))}
    found |= {"sorted_rows": ROWS} if source == 1 else {}
    return found | ({"unknown": ONE} if with_unknown else {})


def _choices(
    dtype: str, projection: str, source: int, tile: int, rank: int, activation: Activation | str | None = ""
) -> dict[str, str | int]:
    found: dict[str, str | int] = {"dtype": dtype, "projection": projection}
    if not isinstance(activation, str):
        found["activation"] = activation.kind if activation else "none"
    return found | {"source": source, "tile": tile, "block_r": rank}


def _activations(projection: str) -> tuple[Activation | None, ...]:
    return (Activation("silu", 0.0, 0.0), None) if projection == "gate_up" else (None,)


def _tensors(projection: str, dtype: str) -> tuple[Any, Any, Any]:
    """X, y and h."""
    rows, halves = TOKENS * TOP_K, HALVES[projection]
    return empty(TOKENS if halves == 2 else rows, K, dtype), empty(rows, halves * N, dtype), empty(rows, N, dtype)


def _xa(projection: str, dtype: str) -> Any:
    return empty(HALVES[projection], TOKENS * TOP_K, RANK, dtype)


def _table(projection: str, dtype: str, rank: int) -> AdapterTable:
    shape = HALVES[projection], SLOTS, EXPERTS
    tensors = [empty(*shape, kind) for kind in ("u64", "u64", "fp32", "i32")]
    return AdapterTable(*tensors, k=K, n=N, max_rank=rank, dtype=torch_dtype(dtype))


def _source(source: int, tile: int) -> AdapterRows | AdapterWork:
    rows = TOKENS * TOP_K
    if source == 2:
        return AdapterWork(empty(9, 4, "i32"), empty(rows, "i32"), empty(rows, "i32"), TOP_K, SLOTS, tile)
    return AdapterRows(empty(rows, "i32"), empty(TOKENS, "i32"), TOP_K, empty(rows, "i32") if source == 1 else None)


def _unknown(projection: str, source: int) -> Any:
    """Counted once: by gate_up, and where there is a plan by its order."""
    return empty(1, "i32") if projection == "gate_up" and source != 2 else None


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))
