"""Operations that make NVFP4 of numbers, and put scales into the order of tensor cores and back."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.formats import nvfp4
from fanfold.kernels.nvfp4 import checks, reference
from fanfold.kernels.nvfp4.reference import Ties
from fanfold.ops.op import Op
from fanfold.spec.weight_format import WeightFormat


def nvfp4_pack_rows(
    x: Tensor, global_scales: Tensor | None = None, token_ids: Tensor | None = None, ties: str | None = None
) -> tuple[Tensor, Tensor]:
    """Activations as E2M1 codes uint8 [M, K/2] and E4M3 scales [M, K/16]: `fanfold.reference.nvfp4_pack_rows`.

    Args:
        x: [T, K] in bf16, fp16 or fp32.
        global_scales: fp32 [M], finite and > 0: two levels, ties to even. None: one level, ties to zero.
        token_ids: int32 [M], the row of x of each row; None: M = T.
        ties: "even" or "zero" instead.

    Raises:
        ArgumentError: an argument is not of that kind.
        UnavailableError: x is where no kernel runs.
    """
    checks.check_packing("nvfp4_pack_rows", x, token_ids, global_scales)
    if x.device.type == "cpu":
        return reference.pack_rows(x, global_scales, token_ids, _ties(ties))
    from fanfold.kernels.nvfp4.pack import pack_rows

    return pack_rows(x, global_scales, token_ids, _ties(ties))


def pack_rows_fake(
    x: Tensor, global_scales: Tensor | None = None, token_ids: Tensor | None = None, ties: str | None = None
) -> tuple[Tensor, Tensor]:
    """Shapes of nvfp4_pack_rows."""
    rows, k = x.shape[0] if token_ids is None else token_ids.shape[0], x.shape[1]
    packed = x.new_empty((rows, k // 2), dtype=torch.uint8)
    return packed, x.new_empty((rows, k // reference.GROUP), dtype=torch.float8_e4m3fn)


def nvfp4_pack_weights(weights: Tensor, divisor: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights as codes uint8 [E, N, K/2], scales E4M3 and global scales fp32 [E], computed in fp32.

    Args:
        weights: [E, N, K] in bf16, fp16 or fp32, finite.
        divisor: global scales divide, as in compressed-tensors' files; else they multiply, as in ModelOpt's.
        transposed: scales [E, K/16, N] instead of [E, N, K/16].

    Raises:
        ArgumentError: the weights are not of that kind.
        UnavailableError: they are where no kernel runs.
    """
    checks.check_weights("nvfp4_pack_weights", weights)
    if weights.device.type != "cpu":
        from fanfold.kernels.nvfp4.weights import pack_weights

        return pack_weights(weights, divisor=divisor, transposed=transposed)
    packed, scales, global_scales = pack_weights_fake(weights, divisor, transposed)
    fmt = WeightFormat("nvfp4", 4, group_size=nvfp4.GROUP, divisor=divisor)
    for expert, weight in enumerate(weights):
        tensors = nvfp4.quantize(fmt, weight.float())
        packed[expert] = tensors["packed"]
        scales[expert] = tensors["scale"].T if transposed else tensors["scale"]
        global_scales[expert] = tensors["global_scale"]
    return packed, scales, global_scales


def pack_weights_fake(weights: Tensor, divisor: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of nvfp4_pack_weights."""
    experts, n, k = weights.shape
    groups = k // reference.GROUP
    shape = (experts, groups, n) if transposed else (experts, n, groups)
    packed = weights.new_empty((experts, n, k // 2), dtype=torch.uint8)
    scales = weights.new_empty(shape, dtype=torch.float8_e4m3fn)
    return packed, scales, weights.new_empty(experts, dtype=torch.float32)


def nvfp4_swizzle(scales: Tensor) -> Tensor:
    """Scales (E4M3 or their bytes) [..., N, K/16] -> [..., S] in the order of tensor cores; padding is 0.

    Any strides: transposed scales come as a view. S = round_up(N, 128) * round_up(K/16, 4).

    Raises:
        ArgumentError: the scales are not of that kind.
        UnavailableError: they are where no kernel runs.
    """
    checks.check_swizzle("nvfp4_swizzle", "scales", scales)
    if scales.device.type == "cpu":
        return reference.swizzle(scales)
    from fanfold.kernels.nvfp4.swizzle import swizzle

    return swizzle(scales)


def swizzle_fake(scales: Tensor) -> Tensor:
    """Shapes of nvfp4_swizzle."""
    size = reference.swizzled_size(scales.shape[-2], scales.shape[-1] * reference.GROUP)
    return scales.new_empty((*scales.shape[:-2], size))


def nvfp4_unswizzle(swizzled: Tensor, n: int, k: int) -> Tensor:
    """[..., N, K/16] of swizzled scales of [N, K]: the inverse.

    Raises:
        ArgumentError: the scales are not of that kind or size.
        UnavailableError: they are where no kernel runs.
    """
    checks.check_swizzle("nvfp4_unswizzle", "swizzled", swizzled, n, k)
    if swizzled.device.type == "cpu":
        return reference.unswizzle(swizzled, n, k)
    from fanfold.kernels.nvfp4.swizzle import unswizzle

    return unswizzle(swizzled, n, k)


def unswizzle_fake(swizzled: Tensor, n: int, k: int) -> Tensor:
    """Shapes of nvfp4_unswizzle."""
    return swizzled.new_empty((*swizzled.shape[:-1], n, k // reference.GROUP))


def _ties(name: str | None) -> Ties | None:
    if name is None or name == "even" or name == "zero":
        return name
    raise ArgumentError(
        "nvfp4_pack_rows: ties",
        found=repr(name),
        expected="'even', 'zero' or None",
        next_step="Leave it out: one level rounds ties to zero, two levels to even.",
    )


OPS = {
    "nvfp4_pack_rows": Op(
        "(Tensor x, Tensor? global_scales=None, Tensor? token_ids=None, str? ties=None) -> (Tensor, Tensor)",
        nvfp4_pack_rows,
        nvfp4_pack_rows,
        pack_rows_fake,
        floats=False,
    ),
    "nvfp4_pack_weights": Op(
        "(Tensor weights, bool divisor, bool transposed) -> (Tensor, Tensor, Tensor)",
        nvfp4_pack_weights,
        nvfp4_pack_weights,
        pack_weights_fake,
        floats=False,
    ),
    "nvfp4_swizzle": Op("(Tensor scales) -> Tensor", nvfp4_swizzle, nvfp4_swizzle, swizzle_fake, floats=False),
    "nvfp4_unswizzle": Op(
        "(Tensor swizzled, int n, int k) -> Tensor", nvfp4_unswizzle, nvfp4_unswizzle, unswizzle_fake, floats=False
    ),
}
