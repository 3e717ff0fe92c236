"""Checks of the arguments of products of NVFP4 experts, before anything runs.

Values are looked at where that waits for nothing: numbers of the host, and tensors on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.nvfp4.experts import Experts
from fanfold.kernels.nvfp4.reference import GROUP, swizzled_size

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALE_DTYPES = (torch.float8_e4m3fn, torch.uint8)
LARGEST = 2**31 - 1
"""What 32-bit offsets reach: so many elements of one matrix, and groups of all rows."""


def check_call(
    op: str,
    x_name: str,
    x: Tensor,
    token_ids: Tensor | None,
    offsets: Sequence[int] | Tensor,
    num_experts: int,
    projections: Sequence[Experts],
    input_scales: Sequence[float] | None,
    outputs: Mapping[str, Tensor],
) -> None:
    """Whether the arguments go together.

    Args:
        op: the operation, for errors.
        x_name: how it calls its activations.
        x: [T, K], [M, K] without token_ids.
        token_ids: int32 [M] or None.
        offsets: E+1 numbers, or int32 [E+1] where x is.
        num_experts: E.
        projections: gate and up, or down.
        input_scales: E numbers, or None.
        outputs: [M, N] of each projection, in x's dtype.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    if num_experts < 0:
        raise _wrong(op, "num_experts", str(num_experts), "0 or more")
    arrays: dict[str, Sequence[object]] = {}
    for projection in projections:
        arrays[projection.name] = projection.packed
        arrays[f"{projection.name}_scales"] = projection.scales
        arrays[f"{projection.name}_global_scales"] = projection.global_scales
    if input_scales is not None:
        arrays["input_scales"] = input_scales
    for name, array in arrays.items():
        if len(array) != num_experts:
            raise _wrong(op, name, f"{len(array)} entries", f"{num_experts}, one for each expert")
    _check_x(op, x_name, x)
    rows = x.shape[0] if token_ids is None else _check_ids(op, token_ids, x)
    _check_groups(op, x_name, rows * x.shape[1])
    bounds = _check_offsets(op, offsets, num_experts, rows, x)
    if token_ids is not None and bounds and token_ids.device.type == "cpu":
        _check_id_values(op, token_ids[bounds[0] : bounds[-1]], x.shape[0])
    for projection, (name, out) in zip(projections, outputs.items(), strict=True):
        _check_output(op, name, out, rows, x)
        for expert in range(num_experts):
            _check_matrix(op, projection, expert, out.shape[1], x)


def check_packing(op: str, x: Tensor, token_ids: Tensor | None, global_scales: Tensor | None) -> None:
    """Whether rows can be packed.

    Raises:
        ArgumentError: as above.
    """
    _check_x(op, "x", x)
    rows = x.shape[0] if token_ids is None else _check_ids(op, token_ids, x)
    _check_groups(op, "x", rows * x.shape[1])
    if global_scales is not None:
        _check_tensor(op, "global_scales", global_scales, (torch.float32,), [rows], x)


def check_weights(op: str, weights: Tensor) -> None:
    """Whether stacked matrices can be packed.

    Raises:
        ArgumentError: as above.
    """
    sound = weights.dim() == 3 and weights.dtype in DTYPES and weights.shape[1] > 0
    if not sound or weights.shape[2] < GROUP or weights.shape[2] % GROUP or not weights.is_contiguous():
        kinds = "contiguous float16, bfloat16 or float32 [E, N, K], N positive, K a positive multiple of 16"
        raise _wrong(op, "weights", _describe(weights), kinds)
    _check_groups(op, "weights", weights.numel())


def check_swizzle(op: str, name: str, scales: Tensor, n: int | None = None, k: int | None = None) -> None:
    """Whether these are scales in rows, or swizzled ones of [N, K].

    Raises:
        ArgumentError: as above.
    """
    if n is None or k is None:
        if scales.dim() < 2 or scales.dtype not in SCALE_DTYPES:
            raise _wrong(op, name, _describe(scales), "float8_e4m3fn or uint8 [..., N, K/16]")
        return
    if n < 0 or k < 0 or k % GROUP:
        raise _wrong(op, "n, k", f"{n}, {k}", "sizes of a matrix, K a multiple of 16")
    size = swizzled_size(n, k)
    if scales.dim() < 1 or scales.shape[-1] != size or scales.dtype not in SCALE_DTYPES:
        raise _wrong(op, name, _describe(scales), f"float8_e4m3fn or uint8 [..., {size}], swizzled for [{n}, {k}]")


def _check_x(op: str, name: str, x: Tensor) -> None:
    if x.dim() != 2 or x.dtype not in DTYPES or x.shape[1] < GROUP or x.shape[1] % GROUP:
        kinds = "float16, bfloat16 or float32 [rows, K], K a positive multiple of 16"
        raise _wrong(op, name, _describe(x), kinds)
    if x.stride(1) != 1:
        raise _wrong(op, name, f"strides {x.stride()}", "the values of one row one behind the other")


def _check_groups(op: str, name: str, numbers: int) -> None:
    if numbers // GROUP > LARGEST:
        raise _wrong(op, name, f"{numbers} numbers", f"at most {LARGEST} groups of {GROUP}")


def _check_ids(op: str, token_ids: Tensor, x: Tensor) -> int:
    _check_tensor(op, "sorted_token_ids", token_ids, (torch.int32,), [token_ids.numel()], x)
    if token_ids.numel() and not x.shape[0]:
        raise _wrong(op, "sorted_token_ids", f"{token_ids.numel()} rows of an x without rows", "none")
    return token_ids.shape[0]


def _check_id_values(op: str, token_ids: Tensor, tokens: int) -> None:
    bad = torch.nonzero((token_ids < 0) | (token_ids >= tokens))
    if len(bad):
        at = int(bad[0])
        raise _wrong(op, "sorted_token_ids", f"{int(token_ids[at])}", f"rows of x, of which there are {tokens}")


def _check_offsets(op: str, offsets: Sequence[int] | Tensor, num_experts: int, rows: int, x: Tensor) -> list[int]:
    """The offsets; none where they lie on a GPU."""
    if isinstance(offsets, Tensor):
        _check_tensor(op, "offsets", offsets, (torch.int32,), [num_experts + 1], x)
        if offsets.device.type != "cpu":
            return []
        offsets = cast("list[int]", offsets.tolist())
    elif len(offsets) != num_experts + 1:
        raise _wrong(op, "offsets", f"{len(offsets)} entries", f"{num_experts + 1}, one more than there are experts")
    if offsets[0] < 0:
        raise _wrong(op, "offsets", f"{offsets[0]} as the first", "0 or more")
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise _wrong(op, "offsets", f"{start} and then {end} for expert {expert}", "no entry below the one before")
    if offsets[-1] > rows:
        raise _wrong(op, "offsets", f"{offsets[-1]} as the last", f"at most {rows}, the rows given")
    return list(offsets)


def _check_output(op: str, name: str, out: Tensor, rows: int, x: Tensor) -> None:
    kind = str(x.dtype).removeprefix("torch.")
    if out.dim() != 2 or out.shape[0] != rows or out.shape[1] < 1 or out.dtype != x.dtype:
        raise _wrong(op, name, _describe(out), f"{kind} [{rows}, N], a row for each row of the group order")
    if out.stride(1) != 1:
        raise _wrong(op, name, f"strides {out.stride()}", "the values of one row one behind the other")
    if out.device != x.device:
        raise _wrong(op, name, str(out.device), f"{x.device}, where the activations are")
    if out.shape[1] * x.shape[1] > LARGEST:
        raise _wrong(op, name, f"{out.shape[1]} x {x.shape[1]} weights a matrix", f"at most {LARGEST}")


def _check_matrix(op: str, projection: Experts, expert: int, n: int, x: Tensor) -> None:
    packed, scales, k = projection.packed[expert], projection.scales[expert], x.shape[1]
    name = f"{projection.name}[{expert}]"
    scales_name = f"{projection.name}_scales[{expert}]"
    if packed is None or scales is None:
        if packed is not None or scales is not None:
            found = f"{'no' if packed is None else 'a'} weight and {'no' if scales is None else 'a'} scale tensor"
            raise _wrong(op, name, found, "both, or None for both")
        return
    _check_tensor(op, name, packed, (torch.uint8,), [n, k // 2], x)
    shape = [swizzled_size(n, k)] if projection.swizzled else [k // GROUP, n]
    _check_tensor(op, scales_name, scales, SCALE_DTYPES, shape, x)


def _check_tensor(
    op: str, name: str, found: Tensor, dtypes: tuple[torch.dtype, ...], shape: list[int], x: Tensor
) -> None:
    if list(found.shape) != shape or found.dtype not in dtypes or not found.is_contiguous():
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise _wrong(op, name, _describe(found), f"contiguous {kinds} {shape}")
    if found.device != x.device:
        raise _wrong(op, name, str(found.device), f"{x.device}, where the activations are")


def _wrong(op: str, what: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"{op}: {what}",
        found=found,
        expected=expected,
        next_step="Pass the rows of one batch in expert order and one layer's experts, packed as NVFP4.",
    )


def _describe(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{strides}"
