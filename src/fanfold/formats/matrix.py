"""Matrix: one packed W [N, K] of a checkpoint, found by the names of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from fanfold.errors import ConfigError, TensorError
from fanfold.formats.blocks import block_of
from fanfold.formats.codec import canonical, check_matrix, check_values, codec, dequantize
from fanfold.formats.files import CheckpointFiles
from fanfold.formats.header import TensorInfo
from fanfold.formats.schemes import Scheme
from fanfold.spec.weight_format import Kind, WeightFormat

DENSE: Mapping[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# Tensors beside a matrix that say nothing of its weights: its shape (read apart) and scales of the KV cache.
BESIDE = frozenset({"bias", "weight_shape", "k_scale", "v_scale", "q_scale", "output_scale"})


@dataclass(frozen=True)
class Matrix:
    """One W [N, K] as the header describes it.

    Attributes:
        module: the Linear's name in the file.
        format: how it is packed. Before g_idx has been read, `act_order` is False.
        fields: the format's canonical names -> tensor names in the file.
        n: outputs.
        k: inputs.
        bias: name of the bias [N], where there is one.
    """

    module: str
    format: WeightFormat
    fields: Mapping[str, str]
    n: int
    k: int
    bias: str | None


def find_matrix(files: CheckpointFiles, scheme: Scheme, module: str, suffixes: Mapping[str, str]) -> Matrix:
    """The matrix that the tensors of one module make; only headers (and `weight_shape`) are read.

    Args:
        files: the checkpoint.
        scheme: what its config says of each module.
        module: the module's name.
        suffixes: what follows the module's name -> tensor name.

    Raises:
        ConfigError: the tensors are packed but the config says nothing of them.
        TensorError: a tensor is missing, unknown, or has a wrong shape or dtype.
        UnsupportedError: the format can't hold such sizes.
    """
    named = {suffix: name for suffix, name in suffixes.items() if suffix not in BESIDE}
    infos = {suffix: files.infos[name] for suffix, name in named.items()}
    fmt = scheme(module)
    dense = dense_format(infos)
    if dense is not None:
        refuse_plain(f"{files.path}: {module}", dense, fmt)
        fmt, fields = dense, {"weight": named["weight"]}
    elif fmt is None:
        raise ConfigError(
            f"{files.path}: {module}",
            found=", ".join(f"{suffix} ({_dtype(info)})" for suffix, info in sorted(infos.items())) or "no weight",
            expected="a plain weight (bf16, fp16 or fp32), as the quantization config does not quantise this module",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )
    else:
        fields = _canonical_fields(files, fmt, module, named)
    by_field = {field: files.infos[name] for field, name in fields.items()}
    n, k = _sizes(files, fmt, module, by_field, suffixes.get("weight_shape"))
    if fmt.kind == "fp8" and fmt.block is None:
        fmt = replace(fmt, block=block_of(f"{files.path}: {module}", by_field.get("scale"), n, k))
    check_matrix(fmt, by_field, n, k, f"{files.path}: {module}")
    fmt = replace(fmt, act_order=False)  # whether g_idx says more than k // group_size is known once it is read
    bias = suffixes.get("bias")
    if bias is not None:
        check_bias(files, bias, (n,))
    return Matrix(module, fmt, fields, n, k, bias)


def dense_format(infos: Mapping[str, TensorInfo]) -> WeightFormat | None:
    """The format of a matrix whose only tensor is a `weight` of plain numbers; None for any other."""
    if set(infos) != {"weight"} or infos["weight"].dtype not in DENSE:
        return None
    kind = DENSE[infos["weight"].dtype]
    return WeightFormat(kind, 32 if kind == "fp32" else 16)


def refuse_plain(where: str, found: WeightFormat, stated: WeightFormat | None) -> None:
    """Refuses plain weights where the config states packed ones: their scales may have been lost.

    Raises:
        ConfigError: `stated` is a format.
    """
    if stated is not None:
        raise ConfigError(
            where,
            found=f"a plain weight ({found})",
            expected=f"{_kind(stated)} tensors, as the quantization config states for this module",
            next_step="Fetch config.json and the weights again. If the module was left as it is on purpose, "
            "the quantization config must except it (ignore, modules_to_not_convert, or -: in dynamic).",
        )


def check_bias(files: CheckpointFiles, name: str, shape: tuple[int, ...]) -> None:
    """Dtype and shape of a bias; only its header is read.

    Raises:
        TensorError: they are others.
    """
    info = files.infos[name]
    if info.shape != shape or info.dtype not in DENSE:
        raise TensorError(
            f"{files.path}: {name}",
            found=f"{_dtype(info)} {list(info.shape)}",
            expected=f"bfloat16, float16 or float32 {list(shape)}",
            next_step="Compare the model's sizes in config.json with the file.",
        )


def read_matrix(files: CheckpointFiles, matrix: Matrix) -> tuple[WeightFormat, dict[str, Tensor]]:
    """Its tensors in canonical shapes, values checked, and the format with `act_order` as its g_idx has it.

    A g_idx that says no more than k // group_size is dropped.

    Raises:
        TensorError: an impossible value.
    """
    fmt = matrix.format
    where = f"{files.path}: {matrix.module}"
    tensors = {field: files.read(name) for field, name in matrix.fields.items()}
    g_idx = tensors.get("g_idx")
    if g_idx is not None and is_plain_order(fmt, g_idx):
        del tensors["g_idx"]
    elif g_idx is not None:
        fmt = replace(fmt, act_order=True)
    check_values(fmt, tensors, where)
    return fmt, canonical(fmt, tensors, matrix.n, matrix.k)


def read_dense(files: CheckpointFiles, matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """W [N, K] as plain numbers: dequantised in fp32, then rounded to `dtype`."""
    fmt, tensors = read_matrix(files, matrix)
    return dequantize(fmt, tensors, matrix.n, matrix.k).to(dtype)


def is_plain_order(fmt: WeightFormat, g_idx: Tensor) -> bool:
    """Whether g_idx [K] is k // group_size, or -1 throughout (compressed-tensors' "none")."""
    k = g_idx.shape[0]
    size = k if fmt.group_size == -1 else fmt.group_size
    return bool((g_idx == torch.arange(k) // size).all()) or (fmt.kind == "packed" and bool((g_idx == -1).all()))


def _canonical_fields(
    files: CheckpointFiles, fmt: WeightFormat, module: str, named: Mapping[str, str]
) -> dict[str, str]:
    fields = {suffix: field for field, names in codec(fmt.kind).FIELDS.items() for suffix in names}
    unknown = sorted(set(named) - set(fields))
    if unknown:
        raise TensorError(
            f"{files.path}: {named[unknown[0]]}",
            found=f"a tensor unknown to {_kind(fmt)}",
            expected=f"among {', '.join(fields)}",
            next_step="The quantiser wrote something that fanfold does not read; nothing is ignored silently.",
        )
    canonical_names: dict[str, str] = {}
    for suffix, name in named.items():
        if fields[suffix] in canonical_names:
            raise TensorError(
                f"{files.path}: {module}",
                found=f"both {name} and {canonical_names[fields[suffix]]}",
                expected=f"one tensor for {fields[suffix]}",
                next_step="Remove the one that does not belong to these weights.",
            )
        canonical_names[fields[suffix]] = name
    return canonical_names


def _sizes(
    files: CheckpointFiles,
    fmt: WeightFormat,
    module: str,
    infos: Mapping[str, TensorInfo],
    shape_name: str | None,
) -> tuple[int, int]:
    """N and K, from the tensor that holds the codes (for pack-quantized from `weight_shape`)."""
    field = {
        "gptq": "qweight",
        "awq": "qweight",
        "packed": "packed",
        "nvfp4": "packed",
        "mxfp4": "packed",
    }.get(fmt.kind, "weight")
    info = infos.get(field)
    if info is None:
        raise _incomplete(files, fmt, module, codec(fmt.kind).FIELDS[field][0], "no such tensor")
    if len(info.shape) != 2:
        raise _incomplete(files, fmt, module, codec(fmt.kind).FIELDS[field][0], f"shape {list(info.shape)}")
    rows, columns = info.shape
    if fmt.kind == "gptq":
        return columns, rows * 32 // fmt.bits
    if fmt.kind == "awq":
        return columns * 8, rows
    if fmt.kind == "packed":
        if shape_name is None:
            raise _incomplete(files, fmt, module, "weight_shape", "no such tensor")
        return _stated_shape(files, shape_name)
    return rows, columns if field == "weight" else columns * 2


def _incomplete(files: CheckpointFiles, fmt: WeightFormat, module: str, suffix: str, found: str) -> TensorError:
    return TensorError(
        f"{files.path}: {module}.{suffix}",
        found=found,
        expected=f"{'a matrix' if found.startswith('shape') else 'a tensor'} of {_kind(fmt)}",
        next_step="Every matrix needs all tensors of its format; fetch the missing files.",
    )


def _stated_shape(files: CheckpointFiles, name: str) -> tuple[int, int]:
    """N and K, from `weight_shape`."""
    info = files.infos[name]
    found = f"{_dtype(info)} {list(info.shape)}"
    if info.shape == (2,) and info.dtype in (torch.int64, torch.int32):
        n, k = cast("list[int]", files.read(name).tolist())
        if min(n, k) > 0:
            return n, k
        found = str([n, k])
    raise TensorError(
        f"{files.path}: {name}",
        found=found,
        expected="the sizes [N, K] of the weight, int64 [2]",
        next_step="The file is damaged: fetch it again.",
    )


def _kind(fmt: WeightFormat) -> str:
    return "fp8" if fmt.kind == "fp8" and fmt.block is None else str(fmt)


def _dtype(info: TensorInfo) -> str:
    return str(info.dtype).removeprefix("torch.")
