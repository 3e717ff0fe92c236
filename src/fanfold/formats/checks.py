"""Checks of the tensors of one matrix: first names, shapes and dtypes, then values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fanfold.errors import TensorError
from fanfold.formats.fields import Field
from fanfold.spec.weight_format import WeightFormat

READ_AGAIN = "The file is damaged or was written for another layout: fetch it again, or requantise the model."


class TensorInfo(Protocol):
    """What is known of a tensor before it is read."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""
        ...


def check_fields(
    fmt: WeightFormat,
    wanted: Mapping[str, Field],
    infos: Mapping[str, TensorInfo],
    suffixes: Mapping[str, tuple[str, ...]],
    where: str,
) -> None:
    """Names, shapes and dtypes of one matrix.

    Args:
        fmt: the format, for the message.
        wanted: what each field must be.
        infos: what is there: tensors, or anything else with `dtype` and `shape`.
        suffixes: canonical name -> names in files.
        where: the matrix, e.g. `model.layers.0.mlp.experts.3.up_proj`.

    Raises:
        TensorError: a field is missing, is unknown, or has another shape or dtype.
    """
    for name, field in wanted.items():
        info = infos.get(name)
        if info is None:
            if field.required:
                raise TensorError(
                    tensor_name(where, name, suffixes),
                    found="no such tensor",
                    expected=f"{_dtype_names(field.dtypes)} {list(field.shape)} for {fmt}",
                    next_step="Every matrix needs all tensors of its format; fetch the missing files.",
                )
            continue
        if not field.fits(info.shape):
            raise TensorError(
                tensor_name(where, name, suffixes),
                found=f"shape {list(info.shape)}",
                expected=f"shape {list(field.shape)} for {fmt}",
                next_step="Compare bits, group_size and sizes with the checkpoint's config; "
                "none of them is ever inferred from shapes.",
            )
        if info.dtype not in field.dtypes:
            raise TensorError(
                tensor_name(where, name, suffixes),
                found=_dtype_names((info.dtype,)),
                expected=f"{_dtype_names(field.dtypes)} for {fmt}",
                next_step=READ_AGAIN,
            )
    for name in infos:
        if name not in wanted:
            raise TensorError(
                tensor_name(where, name, suffixes),
                found="a tensor that the format does not have",
                expected=f"one of {', '.join(wanted)} for {fmt}",
                next_step="Compare the quantization config with the file.",
            )


def check_values(
    fmt: WeightFormat, tensors: Mapping[str, Tensor], suffixes: Mapping[str, tuple[str, ...]], where: str
) -> None:
    """Values that no writer means: they would turn whole experts into NaN, or read other groups.

    Integer words, E2M1 codes and zero points are valid whatever they are. Input scales may be anything:
    where one is 0 or not finite, activations are scaled dynamically.

    Args:
        fmt: the format.
        tensors: the tensors of one matrix, of shapes that `check_fields` has accepted.
        suffixes: canonical name -> names in files.
        where: the matrix.

    Raises:
        TensorError: a scale that is not finite (NaN E4M3, E8M0 255), a global scale that is not positive, a
            weight that is not finite, a g_idx outside [0, G), or not k // group_size without act-order.
    """
    for name, tensor in tensors.items():
        if name in ("scale", "scales", "weight", "global_scale"):
            bad, expected = _not_finite(tensor), "finite numbers"
            if name == "global_scale":
                bad, expected = bad | (tensor <= 0), "a positive, finite number"
        elif name == "g_idx":
            bad, expected = _wrong_groups(fmt, tensor)
        else:
            continue
        if bool(bad.any()):
            first = tuple(int(i) for i in bad.nonzero()[0])
            raise TensorError(
                tensor_name(where, name, suffixes),
                found=f"{_show(tensor[first])} at {list(first)} ({int(bad.sum())} such of {bad.numel()})",
                expected=expected,
                next_step=READ_AGAIN,
            )


def tensor_name(where: str, name: str, suffixes: Mapping[str, tuple[str, ...]]) -> str:
    """`where` and the name of a field in files: `...up_proj.weight_packed (or weight)`."""
    first, *others = suffixes.get(name, (name,))
    return f"{where.removesuffix('.')}.{first}" + (f" (or {', '.join(others)})" if others else "")


def _not_finite(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8:  # E8M0
        return tensor == 255
    if tensor.dtype == torch.float8_e4m3fn:  # no infinities; NaN is all ones but for the sign
        return (tensor.view(torch.uint8) & 0x7F) == 0x7F
    return ~torch.isfinite(tensor)


def _wrong_groups(fmt: WeightFormat, g_idx: Tensor) -> tuple[Tensor, str]:
    k = g_idx.shape[0]
    if fmt.act_order:
        return (g_idx < 0) | (g_idx >= fmt.groups(k)), f"groups in [0, {fmt.groups(k)})"
    size = k if fmt.group_size == -1 else fmt.group_size
    return g_idx != torch.arange(k, device=g_idx.device) // size, f"k // {size}, as {fmt} has no act-order"


def _show(value: Tensor) -> str:
    return str(value.item() if value.dtype in (torch.uint8, torch.int32) else value.float().item())


def _dtype_names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
