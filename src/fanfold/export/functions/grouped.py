"""The grouped product: gate_up and down of all experts, over a plan or row by row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

from fanfold.export.description import Buffer, Choice, Function, Kernel, Need, Range, Size, Value
from fanfold.export.functions import weights
from fanfold.export.functions.example import empty, torch_dtype
from fanfold.export.functions.weights import EXPERTS, N, inputs_of
from fanfold.kernels.grouped.configs import MOST_ROWS, all_configs
from fanfold.spec.activation import Activation
from fanfold.spec.adapters import Aside
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.work import WorkList

TOKENS, TOP_K, SLOTS = 24, 3, 5
"""Of the launch that is compiled: numbers that the compiler learns nothing from."""
CODES = (
    Buffer("codes", "packed weights as they lie on disk, stacked [E, P, ...] (gate first)"),
    Buffer("scales", "scales as they lie on disk, stacked likewise", optional=True),
    Buffer("zeros", "packed zero points as they lie on disk, stacked likewise", optional=True),
    Buffer("global_scales", "one scale a matrix, [E, P]", optional=True),
)
SIZES = (
    Size("tokens", "T"),
    Size("top_k", "k, experts a token", 1),
    Size("experts", "E, experts of these weights"),
    Size("outputs", "N: I for gate_up (of one half), H for down", 1),
    Size("inputs", "K: H for gate_up, I for down", 1),
)
DTYPE = Choice("dtype", "of activations")
FORMAT = Choice("format", "of the weights, as docs/formats names it")
TILE = Choice("tile", "rows of a slot of the work list; fanfold_product_tile says which")
ACTIVATION = Choice("activation", "makes h of gate and up in the same launch; none: the output is y1, gate first")
GPT_OSS = "grouped_mxfp4"
"""Its layers have biases, and clamped_swiglu; the others have none, and SiLU."""
BIAS = Buffer("bias", "added before outputs are rounded, [E, P, N]")
LIMITS = (("alpha", "slope of the sigmoid"), ("limit", "bound of gate and up"))
ASIDES = Choice("aside", "1 where rows with an adapter are set aside for the fold", "1 if has_y1 else 0")
ROWS = ("rows", "tokens * top_k")
WORK = (
    Buffer("work", "the work list of plan_sort, [slots, 4]"),
    Buffer("sorted_rows", "sorted position -> row, [R]"),
)
IDS = (Buffer("topk_ids", "expert of each row, [T, k]; outside [0, E): no expert of these weights"),)
ASIDE = (
    Buffer("y1", "takes y1 of rows that have an adapter, [R, 2 * N], at the positions of `out`", True, True),
    Buffer("adapter_ids", "adapter slot of each token, [T]; outside [0, adapter_slots): the base", optional=True),
)


def functions(op: str) -> dict[str, Function]:
    """By what they do: gate_up and down of a plan, and of single rows."""
    return dict(_functions(op))


@cache
def _functions(op: str) -> tuple[tuple[str, Function], ...]:
    slots, single = ("slots", "rows // tile + experts"), ("slots", "rows")
    up_sizes = (*SIZES, Size("adapter_slots", "slots of the adapter tables; read where y1 is there"))
    up_choices = (DTYPE, FORMAT, ACTIVATION, ASIDES)
    operands, numbers = ((*CODES, BIAS), LIMITS) if op == GPT_OSS else (CODES, ())
    up_in = (Buffer("x", "hidden states [T, K]"), *operands, *ASIDE)
    up_out = Buffer("out", "h [R, N], or y1 [R, 2 * N]; positions without an expert are not written", written=True)
    down_in = (Buffer("x", "h [R, K], in the order that gate_up wrote it"), *operands)
    down_out = Buffer("out", "y2 [R, N] by row; rows without an expert are not written", written=True)
    found = {
        "gate_up": Function(
            op,
            f"{op}_gate_up",
            "gate and up of all rows by a plan, with the activation behind them or without, at sorted positions",
            up_sizes,
            (*up_in, *WORK, up_out),
            (*up_choices, TILE),
            numbers,
            (ROWS, slots),
        ),
        "down": Function(
            op,
            f"{op}_down",
            "down of all rows by a plan",
            SIZES,
            (*down_in, *WORK, down_out),
            (DTYPE, FORMAT, TILE),
            derived=(ROWS, slots),
        ),
        "gather_gate_up": Function(
            op,
            f"{op}_gather_gate_up",
            "gate and up of few rows without a plan, by row: a program a row and tile of outputs",
            up_sizes,
            (*up_in, *IDS, up_out),
            up_choices,
            numbers,
            (ROWS, single),
        ),
        "gather_down": Function(
            op,
            f"{op}_gather_down",
            "down of few rows without a plan",
            SIZES,
            (*down_in, *IDS, down_out),
            (DTYPE, FORMAT),
            derived=(ROWS, single),
        ),
    }
    return tuple(found.items())


def kernels(op: str, arch: str, dtype: str, formats: tuple[str, ...]) -> Iterator[Kernel]:
    """Every kernel of these formats: what layers launch, with the configs that they choose."""
    for name in formats:
        fmt = WeightFormat.parse(name)
        if fmt.dense and fmt.kind != dtype:
            continue
        found: dict[bool, dict[int, LaunchConfig]] = {True: {}, False: {}}
        for config, fused in all_configs(fmt, inputs_of(fmt), torch_dtype(dtype), int(arch.removeprefix("sm_"))):
            found[fused].setdefault(config.block_t, config)
        for planned in (True, False):
            for fused in (True, False):
                # Single rows take the smallest tile.
                tiles = sorted(found[fused]) if planned else [16]
                for tile in tiles:
                    config = found[fused][tile]
                    for aside in (False, True) if fused else (False,):
                        yield _kernel(op, arch, dtype, fmt, config, planned, down=False, fused=fused, aside=aside)
                    if not fused:
                        yield _kernel(op, arch, dtype, fmt, config, planned, down=True, fused=False, aside=False)


def rows_of_tile(tile: int, dtype: str) -> Range:
    """What `kernels.grouped.configs.config_for` takes a tile for."""
    if dtype == "fp32":
        return Range(0, None)
    above = 0
    for most, block_t in MOST_ROWS:
        if block_t == tile:
            return Range(above, most)
        above = most
    return Range(above, None)


def _kernel(
    op: str, arch: str, dtype: str, fmt: WeightFormat, config: LaunchConfig, planned: bool, down: bool, fused: bool,
    aside: bool,
) -> Kernel:  # fmt: skip
    from fanfold.kernels.grouped.product import grouped_product

    halves = 1 if down else 2
    which = ("" if planned else "gather_") + ("down" if down else "gate_up")
    columns = halves if not fused else 1
    width = "outputs" if columns == 1 else "2 * outputs"
    choices: dict[str, str | int] = {"dtype": dtype, "format": fmt.name}
    activation = ("clamped_swiglu" if op == GPT_OSS else "silu") if fused else "none"
    choices |= {} if down else {"activation": activation, "aside": int(aside)}
    choices |= {"tile": config.block_t} if planned else {}
    limits = op == GPT_OSS and not down
    values = {
        **weights.values(fmt, halves),
        "x_ptr": Value("x"),
        "xs.stride_t": Value("0", "not read"),
        "xs.stride_g": Value("0", "not read"),
        "y_ptr": Value("out"),
        "aside.y1": Value("y1"),
        "aside.adapter_ids": Value("adapter_ids"),
        "aside.slots": Value("adapter_slots", "adapter slots"),
        "aside.top_k": Value("top_k", "rows a token"),
        "work_ptr": Value("work" if planned else "topk_ids"),
        "rows_ptr": Value("sorted_rows"),
        "slots": Value("slots", "slots of the work list, or rows"),
        "experts": Value("experts", "E"),
        "N": Value("outputs", "outputs of one half"),
        "K": Value("inputs", "inputs"),
        "top_k": Value("1" if down else "top_k", "rows that share a row of x"),
        "b_ptr": Value("bias"),
        "alpha": Value("alpha") if limits else Value("0", "not read"),
        "limit": Value("limit") if limits else Value("0", "not read"),
        "stride_x": Value("inputs", "elements of x from row to row"),
        "stride_y": Value(width, "elements of out from row to row"),
    }
    needs = {
        "x": Need(dtype, ("rows" if down else "tokens", "inputs")),
        **weights.needs(fmt, halves, torch_dtype(dtype)),
        "out": Need(dtype, ("rows", width)),
    }
    if op == GPT_OSS:
        needs |= {"bias": Need(dtype, ("experts", str(halves), "outputs"))}
    if aside:
        needs |= {"y1": Need(dtype, ("rows", "2 * outputs")), "adapter_ids": Need("i32", ("tokens",))}
    if planned:
        needs |= {"work": Need("i32", ("slots", "4")), "sorted_rows": Need("i32", ("rows",))}
    else:
        needs |= {"topk_ids": Need("i32", ("tokens", "top_k"))}
    tiles = f"ceil_div(outputs, {config.block_n})"
    return Kernel(
        function=functions(op)[which],
        arch=arch,
        choices=choices,
        kernel=grouped_product,
        example=_example(op, fmt, config, arch, dtype, planned, down, fused, aside),
        values=values,
        needs=needs,
        grid=(f"slots * {tiles}" + ("" if columns == 1 else " * 2"), "1", "1"),
        config=config.name,
        rows=rows_of_tile(config.block_t, dtype),
    )


def _example(
    op: str, fmt: WeightFormat, config: LaunchConfig, arch: str, dtype: str, planned: bool, down: bool, fused: bool,
    aside: bool,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a launch, as layers make them."""
    from fanfold.kernels.grouped.launch import launch_arguments

    rows = TOKENS * TOP_K
    halves = 1 if down else 2
    ids = empty(rows, "i32")
    work = WorkList(empty(rows // config.block_t + EXPERTS, 4, "i32"), config.block_t)
    packed = weights.example(fmt, halves, torch_dtype(dtype))
    activation = Activation("silu", 0.0, 0.0)
    if op == GPT_OSS:
        packed = replace(packed, bias=empty(EXPERTS, halves, N, dtype))
        activation = Activation("clamped_swiglu")
    beside = None
    if aside:
        beside = Aside(empty(rows, 2 * N, dtype), empty(TOKENS, "i32"), SLOTS, TOP_K)
    return launch_arguments(
        "export",
        empty(rows if down else TOKENS, inputs_of(fmt), dtype),
        packed,
        work if planned else ids,
        ids if planned else None,
        config,
        empty(rows, N if fused else halves * N, dtype),
        int(arch.removeprefix("sm_")),
        top_k=None if down else TOP_K,
        activation=activation if fused else None,
        scatter=down and planned,
        aside=beside,
    )
