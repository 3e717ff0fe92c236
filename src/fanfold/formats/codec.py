"""The codecs by kind of format: what the tensors of W [N, K] must be, dequantising them, and making them.

A codec works on one matrix W [N, K], on tensors as the file has them but under canonical names; `FIELDS` of
each module maps those to the names in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.formats import awq, checks, dense, fp8, gptq, mxfp4, nvfp4, packed
from fanfold.formats.checks import TensorInfo
from fanfold.formats.fields import Field
from fanfold.spec.weight_format import Kind, WeightFormat
from fanfold.spec.weights import ProjectionWeights


class Codec(Protocol):
    """What every codec module offers."""

    @property
    def FIELDS(self) -> Mapping[str, tuple[str, ...]]:  # noqa: N802 (a constant of the modules)
        """Canonical name -> suffixes that files use for it."""
        ...

    def shapes(self, fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
        """What the tensors of W [N, K] must be."""
        ...

    def dequantize(self, fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
        """W fp32 [N, K]."""
        ...

    def quantize(self, fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors of W fp32 [N, K], rounded to nearest."""
        ...


class CodedCodec(Codec, Protocol):
    """A codec whose weights are small codes packed into words or bytes."""

    def unpack(self, fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
        """Codes uint8 [N, K]."""
        ...

    def pack(self, fmt: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
        """The code field of codes uint8 [N, K]."""
        ...


class IntegerCodec(CodedCodec, Protocol):
    """A codec of integers with zero points."""

    def unpack_zeros(self, fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
        """True zero points int32 [G, N]."""
        ...

    def pack_zeros(self, fmt: WeightFormat, zeros: Tensor) -> Tensor:
        """The zero-point field of true zero points [G, N]."""
        ...


INTEGER: Mapping[Kind, IntegerCodec] = {"gptq": gptq, "awq": awq, "packed": packed}
CODED: Mapping[Kind, CodedCodec] = {**INTEGER, "nvfp4": nvfp4, "mxfp4": mxfp4}
CODECS: Mapping[Kind, Codec] = {**CODED, "fp8": fp8, "bf16": dense, "fp16": dense, "fp32": dense}


def codec(kind: Kind) -> Codec:
    """The codec of that kind of format."""
    return CODECS[kind]


def shapes(fmt: WeightFormat, n: int, k: int) -> dict[str, Field]:
    """What the tensors of W [N, K] must be: canonical name -> Field.

    Raises:
        UnsupportedError: the packing can't hold such sizes, or the format contradicts itself.
    """
    return codec(fmt.kind).shapes(fmt, n, k)


def unpack(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """The codes of the weights.

    Returns:
        uint8 [N, K]: integers as stored (unsigned), or E2M1 codes.

    Raises:
        UnsupportedError: the format has no codes (dense, FP8).
        TensorError: a tensor is missing or has a wrong shape or dtype.
    """
    return _coded(fmt, "unpack").unpack(fmt, canonical(fmt, tensors, n, k), n, k)


def pack(fmt: WeightFormat, codes: Tensor) -> dict[str, Tensor]:
    """The words or bytes of codes; inverse of `unpack`.

    Args:
        fmt: the format to pack for.
        codes: uint8 [N, K].

    Returns:
        The field that holds the codes (`qweight` or `packed`), as `shapes` describes it.

    Raises:
        UnsupportedError: the format has no codes (dense, FP8), or can't hold such sizes.
        ArgumentError: a code is out of range.
    """
    return _coded(fmt, "pack").pack(fmt, codes)


def _coded(fmt: WeightFormat, what: str) -> CodedCodec:
    module = CODED.get(fmt.kind)
    if module is None:
        raise UnsupportedError(
            what,
            found=str(fmt),
            expected=f"one of {', '.join(CODED)}",
            next_step="The weights of this format are plain numbers: dequantize and quantize.",
        )
    return module


def dequantize(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """W in fp32, with the order of operations that the format defines.

    Returns:
        fp32 [N, K]: scale * (q - zero); (code * scale) * global or / global (NVFP4); code * scale (MXFP4);
        weight * scale (FP8).

    Raises:
        TensorError: a tensor is missing or has a wrong shape or dtype.
    """
    return codec(fmt.kind).dequantize(fmt, canonical(fmt, tensors, n, k), n, k)


def quantize(fmt: WeightFormat, weight: Tensor, g_idx: Tensor | None = None) -> dict[str, Tensor]:
    """Plain round-to-nearest, for synthetic models, tests and benchmarks.

    Args:
        fmt: the format to make.
        weight: fp32 [N, K], finite.
        g_idx: int32 [K] group of each k, with act-order only.

    Returns:
        Canonical name -> tensor, as `shapes` describes them.

    Raises:
        ArgumentError: a weight that is not a finite fp32 matrix, or g_idx where the format has none (or none
            where it has one).
        UnsupportedError: the packing can't hold such sizes.
    """
    sound = weight.dim() == 2 and weight.dtype == torch.float32
    if not sound or not bool(torch.isfinite(weight).all()):
        raise ArgumentError(
            "weight",
            found="values that are not finite" if sound else f"{weight.dtype} {list(weight.shape)}",
            expected="finite float32 [N, K]",
            next_step="Pass weight.float() of a sound matrix.",
        )
    if g_idx is not None and not fmt.act_order:
        raise ArgumentError(
            "g_idx",
            found=f"a tensor, with {fmt}",
            expected="None, as the format has no act-order",
            next_step="Drop g_idx, or choose an act-ordered format.",
        )
    return codec(fmt.kind).quantize(fmt, weight, g_idx)


def dequantize_expert(projection: ProjectionWeights, expert: int, half: int) -> Tensor:
    """W fp32 [N, K] of one expert and half (0 = gate or the only one, 1 = up)."""
    return dequantize(projection.format, projection.matrix(expert, half), projection.n, projection.k)


def check_matrix(fmt: WeightFormat, tensors: Mapping[str, TensorInfo], n: int, k: int, where: str) -> None:
    """Names, shapes and dtypes of the tensors of one matrix; nothing is read.

    Args:
        fmt: the format that the config states.
        tensors: canonical name -> a tensor, or anything with `dtype` and `shape`.
        n: outputs.
        k: inputs.
        where: the matrix in the checkpoint, e.g. `model.layers.0.mlp.experts.3.up_proj`.

    Raises:
        TensorError: a field is missing, unknown, or has another shape or dtype.
        UnsupportedError: the packing can't hold such sizes.
    """
    module = codec(fmt.kind)
    try:
        wanted = module.shapes(fmt, n, k)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{where}: {error.what}", found=error.found, expected=error.expected, next_step=error.next_step
        ) from None
    checks.check_fields(fmt, wanted, tensors, module.FIELDS, where)


def check_values(fmt: WeightFormat, tensors: Mapping[str, Tensor], where: str) -> None:
    """Impossible values in the tensors of one matrix that `check_matrix` has accepted.

    Raises:
        TensorError: names the tensor, the first bad value and its place, and how many there are.
    """
    checks.check_values(fmt, tensors, codec(fmt.kind).FIELDS, where)


def canonical(fmt: WeightFormat, tensors: Mapping[str, Tensor], n: int, k: int) -> dict[str, Tensor]:
    """Views of the tensors in exactly the shapes of `shapes` (writers differ in axes of size 1).

    Raises:
        TensorError: a tensor is missing or has a wrong shape or dtype.
    """
    check_matrix(fmt, tensors, n, k, f"{fmt} matrix [{n}, {k}]")
    wanted = shapes(fmt, n, k)
    return {name: tensor.reshape(wanted[name].shape) for name, tensor in tensors.items()}
