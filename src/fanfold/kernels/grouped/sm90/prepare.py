"""4-bit projections in the form that the Hopper product reads: repacked once, at load, on the weights' device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fanfold.errors import UnsupportedError
from fanfold.kernels.common.layouts import layout
from fanfold.kernels.grouped.sm90.fragments import TILE, WORDS, e2m1_words, interleave, to_fragments
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights

INTEGERS = ("gptq", "awq", "packed")
FP4_GROUPS = {"nvfp4": 16, "mxfp4": 32}
GROUPS = (32, 64, 128)
"""Group sizes of integers that the product has been run with."""
LARGEST_E4M3 = 0x7E
"""Scales are read without their sign; 0x7F is NaN."""
LARGEST_E8M0 = 136
"""2^9: a scale is made as bf16 of scale * 2^118."""
# Nibble i of an AWQ word holds column 0, 2, 4, 6, 1, 3, 5, 7; column j is in this nibble.
AWQ_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
ONES = 0x11111111
"""A 1 in each nibble: what writers of GPTQ's "v1" subtract from a word of zero points."""


@dataclass(frozen=True, eq=False)
class FragmentWeights:
    """One projection of all experts in fragment order. NR = P*N rows, gate and up in turn by eights (`fragments`).

    Attributes:
        format: as the weights lay on disk.
        n: outputs of one half.
        k: inputs.
        halves: P, 2 for gate and up, 1 for down.
        words: int32 [E, NR/64, K/64, 512].
        scales: fp16 [E, NR/64, K/G, 64]; of E2M1 codes uint8 [E, NR/64, K/64, 64, 64/G], the file's bytes.
        zeros: zero points uint8, shaped as scales, of asymmetric integers.
        global_scale: of E2M1 codes: fp32 [E, P], by which a whole matrix is multiplied; ones for MXFP4, and for NVFP4
            files that store a divisor its rounded reciprocal.
    """

    format: WeightFormat
    n: int
    k: int
    halves: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.words.shape[0]

    @property
    def rows(self) -> int:
        """NR."""
        return self.n * self.halves

    @property
    def fp4_group(self) -> int:
        """Codes that share a scale, of E2M1 codes; 0 for integers."""
        return FP4_GROUPS.get(self.format.kind, 0)


def prepare(weights: ProjectionWeights) -> FragmentWeights:
    """The projection in fragment order; the weights themselves are left as they are.

    Reads back whether scales are in range, so it waits for the device: call it at load.

    Args:
        weights: GPTQ, AWQ or pack-quantized of 4 bits without act-order, NVFP4 or MXFP4.

    Raises:
        UnsupportedError: the product does not run such weights; the portable one (`kernels.grouped.launch`) does.
        ArgumentError: a tensor is not what the format says.
    """
    _check_supported(weights)
    layout(weights)  # shapes and dtypes
    fmt, n, k, halves, experts = weights.format, weights.n, weights.k, weights.halves, weights.num_experts
    tensors = weights.tensors
    scales = tensors["scales" if fmt.kind in ("gptq", "awq") else "scale"]
    made: dict[str, Tensor] = {
        "words": scales.new_empty((experts, n * halves // TILE, k // TILE, WORDS), dtype=torch.int32)
    }
    if fmt.kind in FP4_GROUPS:
        group = FP4_GROUPS[fmt.kind]
        made["scales"] = scales.new_empty(
            (experts, n * halves // TILE, k // TILE, TILE, TILE // group), dtype=torch.uint8
        )
        made["global_scale"] = _global_scale(weights)
        _check_scale_bytes(fmt, scales.view(torch.uint8))
    else:
        shape = (experts, n * halves // TILE, k // fmt.group_size, TILE)
        made["scales"] = scales.new_empty(shape, dtype=torch.float16)
        _check_exact(fmt, scales)
        if not fmt.symmetric:
            made["zeros"] = scales.new_empty(shape, dtype=torch.uint8)
    for e in range(experts):  # one at a time: unpacked codes take twice the room
        codes = interleave(_codes(fmt, {name: tensor[e] for name, tensor in tensors.items()}, k))
        if fmt.kind in FP4_GROUPS:
            made["words"][e] = e2m1_words(codes)
            tiled = interleave(scales[e].view(torch.uint8)).reshape(-1, TILE, k // TILE, made["scales"].shape[-1])
            made["scales"][e] = tiled.transpose(1, 2)
            continue
        made["words"][e] = to_fragments(codes)
        made["scales"][e] = _by_slab(scales[e].transpose(1, 2) if fmt.kind != "packed" else scales[e])
        if "zeros" in made:
            made["zeros"][e] = _by_slab(_zeros(fmt, {name: tensor[e] for name, tensor in tensors.items()}, n))
    return FragmentWeights(fmt, n, k, halves, **made)


def _by_slab(values: Tensor) -> Tensor:
    """One value a row and group, [P, N, G] -> [NR/64, G, 64]."""
    rows = interleave(values)
    return rows.reshape(-1, TILE, rows.shape[1]).transpose(1, 2)


def _nibbles(words: Tensor) -> Tensor:
    """Words (or bytes) [..., W] -> uint8 [..., 8*W], the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _awq_columns(words: Tensor) -> Tensor:
    """AWQ words [..., N/8] -> uint8 [..., N]."""
    nibbles = _nibbles(words)
    return nibbles.reshape(*nibbles.shape[:-1], -1, 8)[..., list(AWQ_NIBBLE)].flatten(-2)


def _codes(fmt: WeightFormat, tensors: dict[str, Tensor], k: int) -> Tensor:
    """Codes uint8 [P, N, K] of one expert."""
    if fmt.kind == "gptq":
        return _nibbles(tensors["qweight"].transpose(1, 2))
    if fmt.kind == "awq":
        return _awq_columns(tensors["qweight"]).transpose(1, 2)
    return _nibbles(tensors["packed"])[..., :k]


def _zeros(fmt: WeightFormat, tensors: dict[str, Tensor], n: int) -> Tensor:
    """Zero points uint8 [P, N, G] of one expert."""
    if fmt.kind == "gptq":
        # A zero of 0 borrowed from its neighbour; one addition of the whole word gives it back.
        stored = tensors["qzeros"]
        return _nibbles(stored + ONES if fmt.zero_point == "v1" else stored).transpose(1, 2)
    if fmt.kind == "awq":
        return _awq_columns(tensors["qzeros"]).transpose(1, 2)
    return _nibbles(tensors["zero_point"].transpose(1, 2))[..., :n].transpose(1, 2)


def _global_scale(weights: ProjectionWeights) -> Tensor:
    if weights.format.kind == "mxfp4":
        return weights.tensors["scale"].new_ones((weights.num_experts, weights.halves), dtype=torch.float32)
    scale = weights.tensors["global_scale"]
    return torch.reciprocal(scale) if weights.format.divisor else scale.contiguous()


def _check_supported(weights: ProjectionWeights) -> None:
    fmt = weights.format
    integer = fmt.kind in INTEGERS and fmt.bits == 4
    if not integer and fmt.kind not in FP4_GROUPS:
        raise _unsupported(weights, str(fmt), "4-bit gptq, awq or packed, nvfp4 or mxfp4")
    if fmt.act_order:
        raise _unsupported(weights, "act_order", "groups of consecutive inputs")
    if integer and fmt.group_size not in GROUPS:
        raise _unsupported(weights, f"group_size {fmt.group_size}", f"one of {GROUPS}")
    if weights.bias is not None:
        raise _unsupported(weights, "a bias", "no bias")
    if weights.k % TILE or weights.n * weights.halves % TILE or (integer and weights.k % fmt.group_size):
        group = f", K also of {fmt.group_size}" if integer else ""
        raise _unsupported(
            weights, f"{weights.halves} x {weights.n} rows, K = {weights.k}", f"multiples of {TILE}{group}"
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


def _unsupported(weights: ProjectionWeights, found: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"{weights.format} weights on sm_90",
        found=found,
        expected=expected,
        next_step="Use the portable product, which runs every format.",
    )
