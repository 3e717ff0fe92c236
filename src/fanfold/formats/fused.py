"""Fused experts: one tensor holds all experts of a projection.

Met: dense `gate_up_proj`/`down_proj` (also transposed and interleaved, Granite's `input_linear`/`output_linear`),
gpt-oss's MXFP4 `gate_up_proj_blocks`/`_scales`, and FP8 with `_scale_inv`. All become [E, P, ...], gate before up.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fanfold.errors import MissingExpertsError, TensorError, UnsupportedError
from fanfold.formats.codec import check_matrix, check_values
from fanfold.formats.config import ModelConfig
from fanfold.formats.experts import LayerTensors, finite
from fanfold.formats.files import CheckpointFiles
from fanfold.formats.matrix import DENSE
from fanfold.formats.schemes import Scheme
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights

# Spellings of the same field.
FIELDS = {"blocks": "packed", "scales": "scale", "scale_inv": "scale", "weight": "weight", "bias": "bias"}


def fused_format(files: CheckpointFiles, scheme: Scheme, tensors: LayerTensors, projection: str) -> WeightFormat:
    """The format of one fused projection; only headers are read.

    Raises:
        MissingExpertsError: the layer has no such projection.
        UnsupportedError: tensors of a layout that is not read.
    """
    suffixes = tensors.fused.get(projection)
    if suffixes is None:
        raise MissingExpertsError(
            f"{files.path}: {tensors.container}",
            found=f"no {projection}",
            expected=f"{projection} of all experts, as {', '.join(tensors.fused)} is there",
            next_step="Fetch the missing shards. Experts are never filled with random weights.",
        )
    names = set(suffixes) - {"bias"}
    if names == {"weight"} and files.infos[suffixes["weight"]].dtype in DENSE:
        kind = DENSE[files.infos[suffixes["weight"]].dtype]
        return WeightFormat(kind, 32 if kind == "fp32" else 16)
    fmt = scheme(tensors.container)
    if fmt is not None and (fmt.kind, names) in (
        ("mxfp4", {"blocks", "scales"}),
        ("fp8", {"weight", "scale_inv"}),
    ):
        return fmt
    raise UnsupportedError(
        f"{files.path}: {tensors.container}: {projection}",
        found=f"{', '.join(sorted(names))} with {fmt or 'no quantization config'}",
        expected="plain weights, MXFP4 blocks and scales, or FP8 weights with scale_inv",
        next_step="Save the checkpoint with one tensor an expert, or in one of these layouts.",
    )


def read_fused(
    files: CheckpointFiles, scheme: Scheme, config: ModelConfig, tensors: LayerTensors, projection: str
) -> ProjectionWeights:
    """The stack of one fused projection.

    Raises:
        TensorError: a shape that does not fit E or H of config.json, or an impossible value.
        MissingExpertsError, UnsupportedError: as `fused_format`.
    """
    fmt = fused_format(files, scheme, tensors, projection)
    suffixes = tensors.fused[projection]
    halves = 2 if projection == "gate_up" else 1
    read = {
        FIELDS[suffix]: finite(files, name) if suffix == "bias" else files.read(name)
        for suffix, name in suffixes.items()
    }
    bias = read.pop("bias", None)
    experts, n, k = _sizes(files, fmt, config, suffixes, read, projection)
    stacks: dict[str, Tensor] = {}
    for name, tensor in read.items():
        where = f"{files.path}: {tensors.container}.{projection} ({name})"
        if name == "packed":
            tensor = tensor.flatten(2)  # gpt-oss: [E, rows, K/32, 16] bytes
        elif fmt.dense and config.transposed:
            tensor = tensor.transpose(1, 2)
        stacks[name] = _split(tensor, halves, config.interleaved, where)
    weights = ProjectionWeights(
        fmt,
        n,
        k,
        stacks,
        None if bias is None else _split(bias, halves, config.interleaved, f"{tensors.container}: bias"),
    )
    for e in range(experts):
        for p in range(halves):
            where = f"{files.path}: {tensors.container}.{projection}[{e}, {p}]"
            check_matrix(fmt, weights.matrix(e, p), n, k, where)
            check_values(fmt, weights.matrix(e, p), where)
    return weights


def _split(tensor: Tensor, halves: int, interleaved: bool, where: str) -> Tensor:
    """[E, P*rows, ...] -> [E, P, rows, ...], gate before up."""
    experts, rows = tensor.shape[:2]
    if rows % halves:
        raise TensorError(
            where,
            found=f"{rows} rows",
            expected="an even number, half for gate and half for up",
            next_step="Scale blocks that gate and up share can't be told apart: save one tensor an expert.",
        )
    if halves == 2 and interleaved:
        return tensor.reshape(experts, rows // 2, 2, *tensor.shape[2:]).transpose(1, 2).contiguous()
    return tensor.reshape(experts, halves, rows // halves, *tensor.shape[2:]).contiguous()


def _sizes(
    files: CheckpointFiles,
    fmt: WeightFormat,
    config: ModelConfig,
    suffixes: Mapping[str, str],
    read: Mapping[str, Tensor],
    projection: str,
) -> tuple[int, int, int]:
    """E, N of one half, K."""
    codes = read["packed"].flatten(2) if "packed" in read else read["weight"]
    name = suffixes["blocks" if "packed" in read else "weight"]
    if codes.dim() != 3 or (config.num_experts is not None and codes.shape[0] != config.num_experts):
        raise TensorError(
            f"{files.path}: {name}",
            found=f"shape {list(codes.shape)}",
            expected=f"[{config.num_experts or 'E'}, ...] over all experts of config.json",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )
    experts, rows, columns = codes.shape
    if fmt.dense and config.transposed:
        rows, columns = columns, rows
    if fmt.kind == "mxfp4":
        columns *= 2
    hidden = columns if projection != "down" else rows
    if config.hidden_size is not None and hidden != config.hidden_size:
        raise TensorError(
            f"{files.path}: {name}",
            found=f"shape {list(read['packed' if 'packed' in read else 'weight'].shape)}, so H = {hidden}",
            expected=f"H = {config.hidden_size}, stored "
            + ("(E, inputs, outputs)" if config.transposed else "(E, outputs, inputs)"),
            next_step="Another storage order is never guessed from shapes; check model_type and hidden_size.",
        )
    return experts, rows // 2 if projection == "gate_up" else rows, columns
