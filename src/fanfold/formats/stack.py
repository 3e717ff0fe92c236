"""Stacks of experts from tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fanfold.errors import ArgumentError, TensorError
from fanfold.formats.codec import canonical, check_matrix, check_values
from fanfold.spec.weight_format import INTEGER_BITS, WeightFormat
from fanfold.spec.weights import ProjectionWeights

Matrix = Mapping[str, Tensor]
# The array that tells the sizes; `weight` elsewhere.
CODES = {"gptq": "qweight", "awq": "qweight", "packed": "packed", "nvfp4": "packed", "mxfp4": "packed"}


def stack(
    fmt: WeightFormat,
    experts: Sequence[Sequence[Matrix]],
    n: int | None = None,
    k: int | None = None,
    bias: Sequence[Sequence[Tensor]] | None = None,
) -> ProjectionWeights:
    """One projection of a layer from the tensors of its experts, concatenated without permutation.

    Args:
        fmt: how every matrix is packed; never inferred from shapes.
        experts: for each expert, for each half (gate and up, or the only one), canonical name -> tensor, in
            the shapes of the files.
        n: outputs of one half; None takes those of the first matrix.
        k: inputs; None takes those of the first matrix (`packed` needs the number: its words do not tell it).
        bias: for each expert, for each half, [N].

    Returns:
        The stack, [E, P, ...]. fp32 scales of integer formats are rounded to fp16; a `g_idx` that says no
        more than k // group_size is dropped.

    Raises:
        ArgumentError: no experts, lists of unlike lengths, or no `k` where it is needed.
        TensorError: names the array, its expert and half, what was found and what was expected: a missing
            or unknown array, a shape (of another n, k, group size or bit width), dtype or device unlike the
            others, an impossible value.
        UnsupportedError: the packing can't hold such sizes.
    """
    halves = _halves(experts)
    n, k = _sizes(fmt, experts[0][0], n, k)
    matrices = {
        (e, p): _matrix(fmt, matrix, n, k, _place(e, p))
        for e, row in enumerate(experts)
        for p, matrix in enumerate(row)
    }
    names = dict.fromkeys(name for matrix in matrices.values() for name in matrix)
    tensors = {name: _join(name, matrices, halves) for name in names}
    return ProjectionWeights(fmt, n, k, tensors, None if bias is None else _biases(bias, len(experts), halves, n))


def _place(expert: int, half: int) -> str:
    return f"expert {expert} half {half}"


def _halves(experts: Sequence[Sequence[Matrix]]) -> int:
    lengths = [len(halves) for halves in experts]
    if not lengths or len(set(lengths)) != 1 or lengths[0] not in (1, 2):
        raise ArgumentError(
            "experts",
            found=f"halves of the experts: {lengths}" if lengths else "an empty list",
            expected="at least one expert, each with 2 halves (gate, up) or each with 1",
            next_step="Pass the matrices of every expert of the layer.",
        )
    return lengths[0]


def _sizes(fmt: WeightFormat, first: Matrix, n: int | None, k: int | None) -> tuple[int, int]:
    """N and K as given, else as the first matrix has them."""
    if n is not None and k is not None:
        return n, k
    if fmt.kind == "packed" and k is None:
        raise ArgumentError(
            "k",
            found="None",
            expected=f"the number of inputs, for {fmt}",
            next_step="Pass k: the last word of a row may be partly filled, so the words do not tell it.",
        )
    name = CODES.get(fmt.kind, "weight")
    codes = first.get(name)
    if codes is None or codes.dim() != 2:
        raise TensorError(
            f"{_place(0, 0)}.{name}",
            found="no such array" if codes is None else f"shape {list(codes.shape)}",
            expected=f"a matrix, for {fmt}",
            next_step="Pass the arrays of each matrix under their canonical names.",
        )
    rows, columns = codes.shape
    found_n, found_k = {
        "gptq": (columns, rows * 32 // fmt.bits),
        "awq": (columns * 8, rows),
        "nvfp4": (rows, columns * 2),
        "mxfp4": (rows, columns * 2),
    }.get(fmt.kind, (rows, columns))
    return found_n if n is None else n, found_k if k is None else k


def _matrix(fmt: WeightFormat, tensors: Matrix, n: int, k: int, where: str) -> Matrix:
    """The checked tensors of one matrix, in canonical shapes."""
    check_matrix(fmt, tensors, n, k, where)
    check_values(fmt, tensors, where)
    matrix = canonical(fmt, tensors, n, k)
    if not fmt.act_order:
        matrix.pop("g_idx", None)
    for name in ("scale", "scales"):
        if fmt.kind in INTEGER_BITS and name in matrix and matrix[name].dtype == torch.float32:
            matrix[name] = _half_precision(matrix[name], f"{where}.{name}")
    return matrix


def _half_precision(scales: Tensor, where: str) -> Tensor:
    rounded = scales.to(torch.float16)
    if not bool(torch.isfinite(rounded).all()):
        raise TensorError(
            where,
            found=f"{scales.abs().max().item()}",
            expected="at most 65504, as fp32 scales are rounded to fp16",
            next_step="Scale the weights down, or store the scales in bf16.",
        )
    return rounded


def _join(name: str, matrices: Mapping[tuple[int, int], Matrix], halves: int) -> Tensor:
    """[E, P, ...] of one array."""
    first = matrices[0, 0].get(name)
    for (expert, half), matrix in matrices.items():
        found, expected = _kind_of(matrix.get(name)), _kind_of(first)
        if found != expected:
            raise TensorError(
                f"{_place(expert, half)}.{name}",
                found=found,
                expected=f"{expected}, as {_place(0, 0)} has",
                next_step="Give all experts the same arrays, of one dtype and on one device.",
            )
    flat = torch.stack([matrix[name] for matrix in matrices.values()])
    return flat.reshape(-1, halves, *flat.shape[1:])


def _kind_of(tensor: Tensor | None) -> str:
    return "no such array" if tensor is None else f"{tensor.dtype} on {tensor.device}".removeprefix("torch.")


def _biases(bias: Sequence[Sequence[Tensor]], experts: int, halves: int, n: int) -> Tensor:
    lengths = [len(row) for row in bias]
    if lengths != [halves] * experts:
        raise ArgumentError(
            "bias",
            found=f"{len(bias)} experts with {lengths} halves",
            expected=f"{experts} experts with {halves} each, as in experts",
            next_step="Pass one bias for each matrix.",
        )
    matrices: dict[tuple[int, int], Matrix] = {}
    for expert, row in enumerate(bias):
        for half, values in enumerate(row):
            sound = tuple(values.shape) == (n,) and values.is_floating_point()
            if not sound or not bool(values.isfinite().all()):
                found = f"{values.dtype} {list(values.shape)}".removeprefix("torch.")
                raise TensorError(
                    f"{_place(expert, half)}.bias",
                    found="values that are not finite" if sound else found,
                    expected=f"finite floating-point numbers [{n}]",
                    next_step="Pass the bias of this matrix.",
                )
            matrices[expert, half] = {"bias": values}
    return _join("bias", matrices, halves)
