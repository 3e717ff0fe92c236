"""The activation alone, and the weighted sum."""

from __future__ import annotations

from collections.abc import Iterator

from fanfold.export.description import Buffer, Choice, Function, Kernel, Need, Size, Value
from fanfold.export.functions.example import empty
from fanfold.kernels.activation.activate import BLOCK, WARPS
from fanfold.kernels.combine.config import MANY_TOKENS, columns
from fanfold.spec.activation import KINDS

WIDTH, EXPERTS = 640, 101
"""Of the launch that is compiled: whatever is a multiple of 16 here must be one at run time, too."""
TOP_K = (1, 2, 4, 6, 8, 10)
ACTIVATE = Function(
    op="activate",
    name="activate",
    meaning="h = activation(gate, up), where it is not fused behind gate_up",
    sizes=(Size("rows", "R"), Size("outputs", "I", 1)),
    buffers=(
        Buffer("y1", "[R, 2 * I], gate first; [R, I] for relu2"),
        Buffer("h", "[R, I]", written=True),
    ),
    choices=(Choice("dtype", "of y1 and h"), Choice("activation", "which")),
    numbers=(("alpha", "slope of the sigmoid of clamped_swiglu"), ("limit", "bound of clamped_swiglu")),
)
COMBINE = Function(
    op="combine",
    name="combine",
    meaning="out = act(sum over slots, in slot order, of weight * y2)",
    sizes=(Size("tokens", "T"), Size("top_k", "k", 1), Size("experts", "E"), Size("outputs", "H", 1)),
    buffers=(
        Buffer("y2", "[R, H] by row"),
        Buffer("topk_ids", "[T, k]; slots whose id is outside [0, E) add nothing"),
        Buffer("topk_weights", "[T, k]"),
        Buffer("out", "[T, H]", written=True),
    ),
    choices=(
        Choice("dtype", "of y2 and out"),
        Choice("slots", "k", "top_k"),
        Choice("columns", "of a program", f"{columns(MANY_TOKENS)} if tokens >= {MANY_TOKENS} else {columns(1)}"),
    ),
    derived=(("rows", "tokens * top_k"),),
)


def activate_kernels(arch: str, dtype: str) -> Iterator[Kernel]:
    """Every activation."""
    from fanfold.kernels.activation.activate import activate_kernel

    for kind in KINDS:
        stride = "outputs" if kind == "relu2" else "2 * outputs"
        values = {
            "y1_ptr": Value("y1"),
            "h_ptr": Value("h"),
            "I": Value("outputs", "I"),
            "stride": Value(stride, "elements of y1 from row to row"),
            "alpha": Value("alpha"),
            "limit": Value("limit"),
        }
        example = {"y1_ptr": empty(3, 2 * WIDTH, dtype), "h_ptr": empty(3, WIDTH, dtype), "I": WIDTH}
        example |= {"stride": 2 * WIDTH, "alpha": 1.5, "limit": 7.5, "KIND": kind, "BLOCK": BLOCK, "num_warps": WARPS}
        needs = {"y1": Need(dtype, ("rows", stride)), "h": Need(dtype, ("rows", "outputs"))}
        grid = ("rows", f"ceil_div(outputs, {BLOCK})", "1")
        choices = {"dtype": dtype, "activation": kind}
        yield Kernel(ACTIVATE, arch, choices, activate_kernel, example, values, needs, grid, f"b{BLOCK}-w{WARPS}")


def combine_kernels(arch: str, dtype: str) -> Iterator[Kernel]:
    """Weighted sums of every top_k."""
    from fanfold.kernels.combine.combine import combine_kernel

    values = {
        "y2_ptr": Value("y2"),
        "ids_ptr": Value("topk_ids"),
        "weights_ptr": Value("topk_weights"),
        "out_ptr": Value("out"),
        "H": Value("outputs", "H"),
        "E": Value("experts", "E"),
        "stride": Value("outputs", "elements of y2 from row to row"),
        "stride_part": Value("0", "not read"),
    }
    needs = {
        "y2": Need(dtype, ("rows", "outputs")),
        "topk_ids": Need("i32", ("tokens", "top_k")),
        "topk_weights": Need("fp32", ("tokens", "top_k")),
        "out": Need(dtype, ("tokens", "outputs")),
    }
    for top_k in TOP_K:
        for block in (columns(1), columns(MANY_TOKENS)):
            example = {"y2_ptr": empty(3 * top_k, WIDTH, dtype), "ids_ptr": empty(3, top_k, "i32")}
            example |= {"weights_ptr": empty(3, top_k, "fp32"), "out_ptr": empty(3, WIDTH, dtype)}
            example |= {"H": WIDTH, "E": EXPERTS, "stride": WIDTH, "stride_part": 0, "TOP_K": top_k, "PARTS": 1}
            example |= {"BLOCK": block, "num_warps": block // 128, "enable_fp_fusion": False}
            choices: dict[str, str | int] = {"dtype": dtype, "slots": top_k, "columns": block}
            grid = ("tokens", f"ceil_div(outputs, {block})", "1")
            yield Kernel(COMBINE, arch, choices, combine_kernel, example, values, needs, grid, f"k{top_k}-b{block}")
