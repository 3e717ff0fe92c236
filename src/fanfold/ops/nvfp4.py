"""Products of NVFP4 experts with activations in 4 bits (W4A4), for hosts that hold each expert's tensors apart.

T tokens, M rows in expert order (the group order), E experts; expert e owns rows [offsets[e], offsets[e+1]). What all
operations here share:

    x: [T, K] in bf16, fp16 or fp32.
    offsets: E+1 numbers, or int32 [E+1] on x's device, which are not read back (a graph replays for any).
    num_experts: E; every list has so many entries.
    gate, up, down: E2M1 codes uint8 [N, K/2] of each expert, low nibble = even k; None: the expert lives on another
        rank, its rows are not written. Nor are rows outside [offsets[0], offsets[E]).
    *_scales: E4M3 (or its bytes) of each expert: transposed [K/16, N], or swizzled (`nvfp4_swizzle`), as each says.
    *_global_scales: one number a matrix, which multiplies (amax / 2688; compressed-tensors' files hold reciprocals).
    input_scales (`_w4a4`): the checkpoint's input scale of each expert, a multiplier, the larger of gate's and up's.
        Those that are 0 (missing) or not finite are made of the rows of all such experts at each call.
    *_out: [M, N] in x's dtype, written in place: act(alpha * sum of products), each product exact, sums in fp32.

The plain forms pack activations with one level of scales and alpha = the global scale, the `_w4a4` forms with two and
alpha = global scale * input scale. One packing serves gate and up; LoRA reads x itself. Codes and scales are the same
bits on every device. Arguments are checked first: wrong ones raise ArgumentError, also where nothing could run, which
raises UnavailableError. DeviceMemoryError: there is no room for the packed activations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fanfold.errors import DeviceMemoryError
from fanfold.kernels.nvfp4 import checks, reference
from fanfold.kernels.nvfp4.experts import Experts, product
from fanfold.kernels.nvfp4.run import run
from fanfold.ops.op import Op, in_place, refuse_gradients

Offsets = Sequence[int] | Tensor
PerExpert = Sequence[Tensor | None]


def nvfp4_gate_up(
    x: Tensor,
    offsets: Offsets,
    num_experts: int,
    gate: PerExpert,
    gate_scales: PerExpert,
    gate_global_scales: Sequence[float],
    up: PerExpert,
    up_scales: PerExpert,
    up_global_scales: Sequence[float],
    gate_out: Tensor,
    up_out: Tensor,
) -> None:
    """Gate and up of rows x [M, K] that lie in expert order; transposed scales.

    Each expert's rows have the bits of `nvfp4_product` of these rows alone.
    """
    halves = _gate_up(gate, gate_scales, gate_global_scales, up, up_scales, up_global_scales, swizzled=False)
    _run("nvfp4_gate_up", x, None, offsets, num_experts, halves, None, gate_out, up_out)


def nvfp4_gate_up_w4a4(
    x: Tensor,
    offsets: Offsets,
    num_experts: int,
    gate: PerExpert,
    gate_scales: PerExpert,
    gate_global_scales: Sequence[float],
    up: PerExpert,
    up_scales: PerExpert,
    up_global_scales: Sequence[float],
    input_scales: Sequence[float],
    gate_out: Tensor,
    up_out: Tensor,
) -> None:
    """`nvfp4_gate_up` with two levels of scales."""
    halves = _gate_up(gate, gate_scales, gate_global_scales, up, up_scales, up_global_scales, swizzled=False)
    _run("nvfp4_gate_up_w4a4", x, None, offsets, num_experts, halves, input_scales, gate_out, up_out)


def nvfp4_gate_up_grouped(
    x: Tensor,
    sorted_token_ids: Tensor | None,
    offsets: Offsets,
    num_experts: int,
    gate: PerExpert,
    gate_scales: PerExpert,
    gate_global_scales: Sequence[float],
    up: PerExpert,
    up_scales: PerExpert,
    up_global_scales: Sequence[float],
    gate_out: Tensor,
    up_out: Tensor,
) -> None:
    """Gate and up of tokens: row i of the group order is x[sorted_token_ids[i]]; swizzled scales.

    sorted_token_ids: int32 [M], or None: row i is x[i]. On a GPU an id outside [0, T) reads as zeros.
    """
    halves = _gate_up(gate, gate_scales, gate_global_scales, up, up_scales, up_global_scales, swizzled=True)
    _run("nvfp4_gate_up_grouped", x, sorted_token_ids, offsets, num_experts, halves, None, gate_out, up_out)


def nvfp4_gate_up_grouped_w4a4(
    x: Tensor,
    sorted_token_ids: Tensor | None,
    offsets: Offsets,
    num_experts: int,
    gate: PerExpert,
    gate_scales: PerExpert,
    gate_global_scales: Sequence[float],
    up: PerExpert,
    up_scales: PerExpert,
    up_global_scales: Sequence[float],
    input_scales: Sequence[float],
    gate_out: Tensor,
    up_out: Tensor,
) -> None:
    """`nvfp4_gate_up_grouped` with two levels of scales."""
    halves = _gate_up(gate, gate_scales, gate_global_scales, up, up_scales, up_global_scales, swizzled=True)
    op = "nvfp4_gate_up_grouped_w4a4"
    _run(op, x, sorted_token_ids, offsets, num_experts, halves, input_scales, gate_out, up_out)


def nvfp4_down_grouped(
    h: Tensor,
    offsets: Offsets,
    num_experts: int,
    down: PerExpert,
    down_scales: PerExpert,
    down_global_scales: Sequence[float],
    out: Tensor,
) -> None:
    """Down of rows h [M, K] that lie in expert order; swizzled scales."""
    experts = Experts("down", down, down_scales, down_global_scales, swizzled=True)
    _run("nvfp4_down_grouped", h, None, offsets, num_experts, [experts], None, out)


def nvfp4_down_grouped_w4a4(
    h: Tensor,
    offsets: Offsets,
    num_experts: int,
    down: PerExpert,
    down_scales: PerExpert,
    down_global_scales: Sequence[float],
    input_scales: Sequence[float],
    out: Tensor,
) -> None:
    """`nvfp4_down_grouped` with two levels of scales."""
    experts = Experts("down", down, down_scales, down_global_scales, swizzled=True)
    _run("nvfp4_down_grouped_w4a4", h, None, offsets, num_experts, [experts], input_scales, out)


def nvfp4_product(
    x: Tensor, weight: Tensor, scales: Tensor, global_scale: float, input_scale: float | None = None
) -> Tensor:
    """act(alpha * x W^T) [M, N] of one expert.

    Args:
        x: [M, K].
        weight: uint8 [N, K/2].
        scales: E4M3 or its bytes, transposed [K/16, N].
        global_scale: multiplies.
        input_scale: None: one level of scales; 0 or not finite: two, made of all rows of x.
    """
    out = product_fake(x, weight, scales, global_scale, input_scale)
    experts = Experts("weight", [weight], [scales], [global_scale], swizzled=False)
    given = None if input_scale is None else [input_scale]
    _run("nvfp4_product", x, None, [0, out.shape[0]], 1, [experts], given, out)
    return out


def product_fake(
    x: Tensor, weight: Tensor, scales: Tensor, global_scale: float, input_scale: float | None = None
) -> Tensor:
    """Shapes of nvfp4_product."""
    return x.new_empty((x.shape[0], weight.shape[0]))


def _gate_up(
    gate: PerExpert,
    gate_scales: PerExpert,
    gate_global_scales: Sequence[float],
    up: PerExpert,
    up_scales: PerExpert,
    up_global_scales: Sequence[float],
    swizzled: bool,
) -> list[Experts]:
    return [
        Experts("gate", gate, gate_scales, gate_global_scales, swizzled),
        Experts("up", up, up_scales, up_global_scales, swizzled),
    ]


def _run(
    op: str,
    x: Tensor,
    token_ids: Tensor | None,
    offsets: Offsets,
    num_experts: int,
    projections: list[Experts],
    input_scales: Sequence[float] | None,
    *outputs: Tensor,
) -> None:
    refuse_gradients(op, x, *outputs)
    names = ["out"] if len(outputs) == 1 else [f"{projection.name}_out" for projection in projections]
    named = dict(zip(names, outputs, strict=True))
    x_name = "h" if projections[0].name == "down" else "x"
    checks.check_call(op, x_name, x, token_ids, offsets, num_experts, projections, input_scales, named)
    if x.device.type == "cpu":
        steps = reference.pack_rows, product
    else:
        from fanfold.kernels.common.device import arch_of
        from fanfold.kernels.nvfp4 import launch, pack

        arch_of(x.device)  # says so where no kernel runs
        steps = pack.pack_rows, launch.product
    try:
        run(*steps, x, token_ids, offsets, projections, input_scales, outputs)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"{op}: packed {x_name}",
            found=f"no room on {x.device}",
            expected="room for 9/16 byte a number of the activations",
            next_step="Free memory there, or pass fewer rows at once.",
        ) from error


def _schemas() -> dict[str, str]:
    """Arguments of each entry point; OFFSETS stands for one of their two forms."""
    halves = ", ".join(
        f"Tensor?[] {name}, Tensor?[] {name}_scales, float[] {name}_global_scales" for name in ("gate", "up")
    )
    outputs = "Tensor(a!) gate_out, Tensor(b!) up_out"
    down = "Tensor?[] down, Tensor?[] down_scales, float[] down_global_scales"
    count = "OFFSETS offsets, int num_experts"
    return {
        "nvfp4_gate_up": f"(Tensor x, {count}, {halves}, {outputs}) -> ()",
        "nvfp4_gate_up_w4a4": f"(Tensor x, {count}, {halves}, float[] input_scales, {outputs}) -> ()",
        "nvfp4_gate_up_grouped": f"(Tensor x, Tensor? sorted_token_ids, {count}, {halves}, {outputs}) -> ()",
        "nvfp4_gate_up_grouped_w4a4": f"(Tensor x, Tensor? sorted_token_ids, {count}, {halves}, "
        f"float[] input_scales, {outputs}) -> ()",
        "nvfp4_down_grouped": f"(Tensor h, {count}, {down}, Tensor(a!) out) -> ()",
        "nvfp4_down_grouped_w4a4": f"(Tensor h, {count}, {down}, float[] input_scales, Tensor(a!) out) -> ()",
    }


ENTRIES = {
    entry.__name__: entry
    for entry in (
        nvfp4_gate_up,
        nvfp4_gate_up_w4a4,
        nvfp4_gate_up_grouped,
        nvfp4_gate_up_grouped_w4a4,
        nvfp4_down_grouped,
        nvfp4_down_grouped_w4a4,
    )
}
OPS = {
    "nvfp4_product": Op(
        "(Tensor x, Tensor weight, Tensor scales, float global_scale, float? input_scale=None) -> Tensor",
        nvfp4_product,
        nvfp4_product,
        product_fake,
        floats=False,
    ),
}
for _name, _schema in _schemas().items():
    _call = ENTRIES[_name]
    # The first that does not match prints what it was given, which would read tensors: so it must not be given any.
    OPS[_name] = Op(_schema.replace("OFFSETS", "Tensor"), _call, _call, in_place, floats=False)
    OPS[f"{_name}.host"] = Op(_schema.replace("OFFSETS", "int[]"), _call, _call, in_place, floats=False)
