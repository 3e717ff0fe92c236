"""4-bit projections in the form that the Hopper product reads: repacked once, at load, on the weights' device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from fanfold.errors import UnsupportedError
from fanfold.kernels.common.layouts import layout
from fanfold.kernels.grouped.sm90 import file_codes
from fanfold.kernels.grouped.sm90.act_order import sorted_inputs
from fanfold.kernels.grouped.sm90.fragments import TILE, e2m1_words, interleave, to_fragments
from fanfold.kernels.grouped.sm90.scale_bytes import LARGEST_E4M3, LARGEST_E8M0, from_e4m3, from_e8m0
from fanfold.kernels.grouped.sm90.supported import FP4_GROUPS, refusal
from fanfold.kernels.grouped.sm90.weights import SCALES, FragmentWeights, padded
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

AT_ONCE = 2**26
"""Codes that are unpacked at once, a byte each."""


def prepare_layer(weights: ExpertWeights) -> tuple[FragmentWeights, FragmentWeights]:
    """Both projections of a layer, act-order included; the weights themselves are left as they are.

    K is sorted by group. Down's order costs nothing at run time: gate and up make h in it (see
    `FragmentWeights.hidden_order`). That of gate and up costs a reordered copy of x for each row.

    Reads back whether scales and groups are as needed, so it waits for the device: call it at load.

    Args:
        weights: GPTQ, AWQ or pack-quantized of 4 bits, NVFP4 or MXFP4; biases are kept.

    Returns:
        gate_up and down.

    Raises:
        UnsupportedError: the product does not run such weights (names the reason); the portable one does.
        ArgumentError: a tensor is not what the format says.
    """
    for projection in (weights.gate_up, weights.down):
        _check_supported(projection)
        layout(projection)
    order = sorted_inputs("gate_up", weights.gate_up) if weights.gate_up.format.act_order else None
    hidden = sorted_inputs("down", weights.down) if weights.down.format.act_order else None
    return (
        _prepare(weights.gate_up, inputs=order, outputs=hidden),
        _prepare(weights.down, inputs=hidden, hidden_order=hidden),
    )


def prepare(weights: ProjectionWeights) -> FragmentWeights:
    """One projection in fragment order, for weights without act-order; else as `prepare_layer`.

    Args:
        weights: as for `prepare_layer`.

    Raises:
        UnsupportedError: the product does not run such weights, or only as a whole layer.
        ArgumentError: a tensor is not what the format says.
    """
    if weights.format.act_order:
        raise _unsupported(weights, "act_order", "both projections together", "Call prepare_layer.")
    _check_supported(weights)
    layout(weights)
    return _prepare(weights)


def _prepare(
    weights: ProjectionWeights,
    inputs: Tensor | None = None,
    outputs: Tensor | None = None,
    hidden_order: Tensor | None = None,
) -> FragmentWeights:
    """The projection with inputs and outputs in the orders [E, K] and [E, N]; hidden_order: h comes sorted already."""
    fmt, n, k, halves, experts = weights.format, weights.n, weights.k, weights.halves, weights.num_experts
    fp4 = FP4_GROUPS.get(fmt.kind, 0)
    stored = file_codes.scales(fmt, weights.tensors)
    if fp4:
        _check_scale_bytes(fmt, stored.view(torch.uint8))
    else:
        _check_exact(fmt, stored)
    rows, padded_k = padded(n * halves), padded(k)
    slabs, tiles = rows // TILE, padded_k // TILE
    shape = (experts, slabs, tiles if fp4 else padded_k // fmt.group_size, TILE)
    kind = SCALES.get(fp4, torch.float16)
    made = {
        "words": stored.new_empty((experts, slabs, tiles, 4 * TILE * TILE // 32), dtype=torch.int32),
        "scales": stored.new_empty(shape, dtype=kind),
    }
    if not fp4 and not fmt.symmetric:
        made["zeros"] = stored.new_empty(shape, dtype=torch.uint8)
    step = max(1, AT_ONCE // max(1, halves * n * k))
    for first in range(0, experts, step):
        part = slice(first, first + step)
        few = {name: tensor[part] for name, tensor in weights.tensors.items()}
        order = None if outputs is None else outputs[part]
        found = _fragments(fmt, few, n, k, None if inputs is None else inputs[part], order, (rows, padded_k))
        for name, tensor in found.items():
            made[name][part] = tensor
    bias = weights.bias
    if bias is not None:
        bias = bias.float() if outputs is None else _by_output(bias.float()[..., None], outputs)[..., 0]
        made["bias"] = bias.contiguous()
    if fp4:
        made["global_scale"] = _global_scale(weights)
    if hidden_order is None:
        made |= {} if inputs is None else {"order": inputs}
        hidden_order = outputs
    short = not fp4 and bool((stored.bfloat16().float() == stored.float()).all())
    return FragmentWeights(fmt, n, k, halves, **made, hidden_order=hidden_order, short_scales=short)


def _fragments(
    fmt: WeightFormat,
    tensors: Mapping[str, Tensor],
    n: int,
    k: int,
    inputs: Tensor | None,
    outputs: Tensor | None,
    padded: tuple[int, int],
) -> dict[str, Tensor]:
    """words, scales and zeros of a few experts."""
    fp4 = FP4_GROUPS.get(fmt.kind, 0)
    codes = file_codes.codes(fmt, tensors, k)
    if inputs is not None:
        codes = codes.gather(3, inputs.long()[:, None, None, :].expand_as(codes))
    stored = file_codes.scales(fmt, tensors)
    if fp4:
        stored = stored.view(torch.uint8)
        if fmt.kind == "nvfp4":  # the kernel's scales have no zero
            codes = (codes.reshape(*stored.shape, fp4) * (stored != 0)[..., None]).flatten(-2)
        stored = from_e4m3(stored) if fmt.kind == "nvfp4" else from_e8m0(stored)
        scales = _rows(stored, outputs, padded[0], padded[1] // fp4)
        tiled = scales.reshape(len(scales), -1, TILE, padded[1] // TILE, TILE // fp4).transpose(2, 3).contiguous()
        words = tiled.view(SCALES[fp4])[..., 0]
        return {"words": e2m1_words(_rows(codes, outputs, *padded)), "scales": words}
    codes = _rows(codes, outputs, *padded)
    groups = padded[1] // fmt.group_size
    made = {"words": to_fragments(codes), "scales": _by_slab(_rows(stored, outputs, padded[0], groups))}
    if not fmt.symmetric:
        made["zeros"] = _by_slab(_rows(file_codes.zero_points(fmt, tensors, n), outputs, padded[0], groups))
    return made


def _rows(values: Tensor, outputs: Tensor | None, rows: int, columns: int) -> Tensor:
    """[E, P, N, C] -> [E, rows, columns]: outputs in order, gate and up in turn, zeros behind."""
    values = interleave(values if outputs is None else _by_output(values, outputs))
    return pad(values, (0, columns - values.shape[2], 0, rows - values.shape[1]))


def _by_output(values: Tensor, outputs: Tensor) -> Tensor:
    """[E, P, N, C] with N in the order [E, N]."""
    return values.gather(2, outputs.long()[:, None, :, None].expand_as(values))


def _by_slab(values: Tensor) -> Tensor:
    """[E, NR, G] -> [E, NR/64, G, 64]."""
    return values.reshape(len(values), -1, TILE, values.shape[2]).transpose(2, 3)


def _global_scale(weights: ProjectionWeights) -> Tensor:
    if weights.format.kind == "mxfp4":
        return weights.tensors["scale"].new_ones((weights.num_experts, weights.halves), dtype=torch.float32)
    scale = weights.tensors["global_scale"]
    return torch.reciprocal(scale) if weights.format.divisor else scale.contiguous()


def _check_supported(weights: ProjectionWeights) -> None:
    reason = refusal(weights.format, weights.halves, weights.n, weights.k, torch.bfloat16)
    if reason is not None:
        raise _unsupported(
            weights, reason, "weights that it runs", "Use the portable product, which runs every format."
        )


def _check_exact(fmt: WeightFormat, scales: Tensor) -> None:
    wrong = scales.half().float() != scales.float()
    if bool(wrong.any()):
        first = float(scales[wrong][0])
        raise UnsupportedError(
            f"{fmt} scales on sm_90",
            found=f"{int(wrong.sum())} that float16 does not hold, the first {first}",
            expected="scales that float16 holds exactly",
            next_step="Use the portable product, which reads scales as they are.",
        )


def _check_scale_bytes(fmt: WeightFormat, scales: Tensor) -> None:
    largest = LARGEST_E4M3 if fmt.kind == "nvfp4" else LARGEST_E8M0
    wrong = scales > largest
    if bool(wrong.any()):
        raise UnsupportedError(
            f"{fmt} scales on sm_90",
            found=f"{int(wrong.sum())} bytes over {largest}, the first {int(scales[wrong][0])}",
            expected="positive finite E4M3" if fmt.kind == "nvfp4" else "E8M0 up to 2^9",
            next_step="Use the portable product, which reads every scale.",
        )


def _unsupported(weights: ProjectionWeights, found: str, expected: str, next_step: str) -> UnsupportedError:
    return UnsupportedError(f"{weights.format} weights on sm_90", found=found, expected=expected, next_step=next_step)
