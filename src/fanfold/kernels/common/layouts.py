"""What a kernel must know of a packed projection: operands, the functions that read them, and constants.

Packed zero points are unpacked where they are used: one word for each output and group is little beside the codes. So
weights stay as they lie on disk, and nothing is copied when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.common import codes as read_codes
from fanfold.kernels.common import scales as read_scales
from fanfold.kernels.common.operands import Codes, Order, Scales, Zeros
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
NO_SCALES = Scales(None, 0, 0, 0, 0, 1, 1)
NO_ZEROS = Zeros(None, 0, 0, 0, 0)
NO_ORDER = Order(None, 0, 0)
NARROWEST_8_BIT = 32
"""Inputs of one instruction of a matrix unit, of 8 bits each."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How one projection is read.

    Attributes:
        codes, scales, zeros, order: operands.
        matrix_scale: fp32 [E, P], one scale a matrix (NVFP4), or None.
        read_codes: the function of `common.codes`.
        read_zeros: the function of `common.scales`, or None where all zero points are `zero`.
        zero: the zero point of symmetric integers; None where codes are numbers.
        scale_kind: how scales are stored; None where there are none.
        bits: bits a code.
        v1: packed zero points hold the zero - 1.
        divide: `matrix_scale` divides.
        run: consecutive inputs that certainly share a group, a power of two; 0 where all do.
    """

    codes: Codes
    read_codes: Callable[..., object]
    bits: int
    scales: Scales = NO_SCALES
    zeros: Zeros = NO_ZEROS
    order: Order = NO_ORDER
    matrix_scale: Tensor | None = None
    read_zeros: Callable[..., object] | None = None
    zero: int | None = None
    scale_kind: Literal["float", "e4m3", "e8m0"] | None = None
    v1: bool = False
    divide: bool = False
    run: int = 0


def layout(weights: ProjectionWeights) -> Layout:
    """How the projection is read.

    Raises:
        ArgumentError: a tensor is missing, or its shape, dtype or strides are not those of the format; group sizes and
            bits are never inferred from shapes.
    """
    return _LAYOUTS[weights.format.kind](weights)


def layout_of_8_bit_product(weights: ProjectionWeights) -> Layout:
    """As `layout`, for FP8 weights that meet activations of 8 bits.

    Raises:
        ArgumentError: the weights are not FP8, or their blocks are too narrow; or as for `layout`.
    """
    packed = layout(weights)
    if weights.format.kind != "fp8" or 0 < packed.run < NARROWEST_8_BIT:
        raise ArgumentError(
            "weights of a W8A8 product",
            found=str(weights.format),
            expected=f"fp8-tensor, fp8-channel, or blocks of a multiple of {NARROWEST_8_BIT} inputs",
            next_step="Leave the activations as they are.",
        )
    return replace(packed, read_codes=read_codes.e4m3_operands)


def run_of(fmt: WeightFormat, k: int) -> int:
    """`WeightFormat.run`."""
    return fmt.run(k)


def _dense(weights: ProjectionWeights) -> Layout:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[weights.format.kind]
    weight = _tensor(weights, "weight", (weights.n, weights.k), (dtype,), strided=True)
    return Layout(Codes(weight, *_four(weight)), read_codes.dense, weights.format.bits)


def _gptq(weights: ProjectionWeights) -> Layout:
    fmt, n, k = weights.format, weights.n, weights.k
    qweight = _tensor(weights, "qweight", (k * fmt.bits // 32, n), (torch.int32,))
    scales = _tensor(weights, "scales", (fmt.groups(k), n), FLOATS)
    e, p, stride_k, stride_n = qweight.stride()
    return _integers(
        weights,
        Codes(qweight, e, p, stride_n, stride_k),
        _scales(weights, scales, transposed=True),
        None if fmt.symmetric else _tensor(weights, "qzeros", (fmt.groups(k), n * fmt.bits // 32), (torch.int32,)),
        zeros_transposed=True,
    )


def _packed(weights: ProjectionWeights) -> Layout:
    fmt, n, k = weights.format, weights.n, weights.k
    packed = _tensor(weights, "packed", (n, -(-k * fmt.bits // 32)), (torch.int32,))
    scale = _tensor(weights, "scale", (n, fmt.groups(k)), FLOATS)
    shape = (-(-n * fmt.bits // 32), fmt.groups(k))
    return _integers(
        weights,
        Codes(packed, *_four(packed)),
        _scales(weights, scale, transposed=False),
        None if fmt.symmetric else _tensor(weights, "zero_point", shape, (torch.int32,)),
        zeros_transposed=False,
    )


def _integers(
    weights: ProjectionWeights, codes: Codes, scales: Scales, zeros: Tensor | None, zeros_transposed: bool
) -> Layout:
    """GPTQ and pack-quantized, which differ in the order of axes."""
    fmt = weights.format
    read, read_zero = read_codes.words_along_k, read_scales.zeros_along_n
    if fmt.bits == 3:
        read, read_zero = read_codes.bytes_along_k_of_3_bits, read_scales.zeros_along_n_of_3_bits
        codes = codes._replace(ptr=codes.ptr.view(torch.uint8))
        codes = codes._replace(stride_e=codes.stride_e * 4, stride_p=codes.stride_p * 4)
    operand = NO_ZEROS
    if zeros is not None:
        e, p, first, second = zeros.stride()
        operand = Zeros(zeros, e, p, second, first) if zeros_transposed else Zeros(zeros, e, p, first, second)
        if fmt.bits == 3:
            operand = operand._replace(ptr=zeros.view(torch.uint8), stride_e=e * 4, stride_p=p * 4)
    return Layout(
        codes,
        read,
        fmt.bits,
        scales=scales,
        zeros=operand,
        order=_order(weights),
        read_zeros=None if zeros is None else read_zero,
        zero=1 << (fmt.bits - 1),
        scale_kind="float",
        v1=fmt.zero_point == "v1" and not fmt.symmetric,
        run=run_of(fmt, weights.k),
    )


def _awq(weights: ProjectionWeights) -> Layout:
    fmt, n, k = weights.format, weights.n, weights.k
    qweight = _tensor(weights, "qweight", (k, n // 8), (torch.int32,))
    scales = _tensor(weights, "scales", (fmt.groups(k), n), FLOATS)
    e, p, stride_k, stride_n = qweight.stride()
    zeros = NO_ZEROS
    if not fmt.symmetric:
        qzeros = _tensor(weights, "qzeros", (fmt.groups(k), n // 8), (torch.int32,))
        zeros_e, zeros_p, stride_g, stride_word = qzeros.stride()
        zeros = Zeros(qzeros, zeros_e, zeros_p, stride_word, stride_g)
    return Layout(
        Codes(qweight, e, p, stride_n, stride_k),
        read_codes.awq_words,
        fmt.bits,
        scales=_scales(weights, scales, transposed=True),
        zeros=zeros,
        read_zeros=None if fmt.symmetric else read_scales.awq_zeros,
        zero=1 << (fmt.bits - 1),
        scale_kind="float",
        run=run_of(fmt, k),
    )


def _nvfp4(weights: ProjectionWeights) -> Layout:
    n, k = weights.n, weights.k
    packed = _tensor(weights, "packed", (n, k // 2), (torch.uint8,))
    scale = _tensor(weights, "scale", (n, k // 16), (torch.float8_e4m3fn,))
    return Layout(
        _words_of_nibbles(packed),
        read_codes.e2m1_words,
        4,
        scales=_scales(weights, scale.view(torch.uint8), transposed=False),
        matrix_scale=_tensor(weights, "global_scale", (), (torch.float32,)),
        scale_kind="e4m3",
        divide=weights.format.divisor,
        run=run_of(weights.format, k),
    )


def _mxfp4(weights: ProjectionWeights) -> Layout:
    n, k = weights.n, weights.k
    packed = _tensor(weights, "packed", (n, k // 2), (torch.uint8,))
    scale = _tensor(weights, "scale", (n, k // 32), (torch.uint8,))
    return Layout(
        _words_of_nibbles(packed),
        read_codes.e2m1_words,
        4,
        scales=_scales(weights, scale, transposed=False),
        scale_kind="e8m0",
        run=run_of(weights.format, k),
    )


def _fp8(weights: ProjectionWeights) -> Layout:
    fmt, n, k = weights.format, weights.n, weights.k
    rows, columns = (-1, -1) if fmt.block is None else fmt.block
    weight = _tensor(weights, "weight", (n, k), (torch.float8_e4m3fn,))
    if (rows, columns) == (-1, -1):
        scale = _tensor(weights, "scale", (), FLOATS)
        scales = Scales(scale, scale.stride(0), scale.stride(1), 0, 0, n, k)
    else:
        rows, columns = n if rows == -1 else rows, k if columns == -1 else columns
        scale = _tensor(weights, "scale", (-(-n // rows), -(-k // columns)), FLOATS)
        scales = Scales(scale, *_four(scale), rows, columns)
    return Layout(
        Codes(weight.view(torch.uint8), *_four(weight)),
        read_codes.e4m3_bytes,
        8,
        scales=scales,
        scale_kind="float",
        run=run_of(fmt, k),
    )


_LAYOUTS: Mapping[str, Callable[[ProjectionWeights], Layout]] = {
    **dict.fromkeys(("bf16", "fp16", "fp32"), _dense),
    "gptq": _gptq,
    "packed": _packed,
    "awq": _awq,
    "nvfp4": _nvfp4,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
}


def _words_of_nibbles(packed: Tensor) -> Codes:
    """Bytes of two codes along K as int32 words of eight; K is a multiple of 16 in both formats."""
    words = packed.view(torch.int32)
    return Codes(words, *_four(words))


def _scales(weights: ProjectionWeights, scales: Tensor, transposed: bool) -> Scales:
    """Scales [E, P, N, G], or [E, P, G, N] when transposed; one for each output."""
    size = weights.k if weights.format.group_size == -1 else weights.format.group_size
    e, p, first, second = scales.stride()
    n, g = (second, first) if transposed else (first, second)
    return Scales(scales, e, p, n, g, 1, size)


def _order(weights: ProjectionWeights) -> Order:
    if not weights.format.act_order:
        return NO_ORDER
    g_idx = _tensor(weights, "g_idx", (weights.k,), (torch.int32,))
    e, p, _ = g_idx.stride()
    return Order(g_idx, e, p)


def _tensor(
    weights: ProjectionWeights,
    name: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    strided: bool = False,
) -> Tensor:
    """The tensor [E, P, *shape] of that name.

    Raises:
        ArgumentError: it is missing, or of another shape or dtype, or (unless `strided`) not dense within a matrix.
    """
    expected = (weights.num_experts, weights.halves, *shape)
    tensor = weights.tensors.get(name)
    if tensor is None or tuple(tensor.shape) != expected or tensor.dtype not in dtypes:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(
            f"{weights.format} weights: {name}",
            found="no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch."),
            expected=f"{kinds} {list(expected)}",
            next_step="Make the projection with fanfold.formats.stack; sizes are never inferred from shapes.",
        )
    if tensor.numel() and not strided and not tensor[0, 0].is_contiguous():
        raise ArgumentError(
            f"{weights.format} weights: {name}",
            found=f"strides {list(tensor.stride())}",
            expected="the values of one matrix one behind the other",
            next_step="Call .contiguous() on the tensor.",
        )
    return tensor


def _four(tensor: Tensor) -> tuple[int, int, int, int]:
    """Strides of [E, P, ., .]."""
    e, p, first, second = tensor.stride()
    return e, p, first, second
