"""Fused experts: one tensor holds all experts of a projection.

Met: dense `gate_up_proj`/`down_proj` (also transposed and interleaved, Granite's `input_linear`/`output_linear`),
gpt-oss's MXFP4 `gate_up_proj_blocks`/`_scales`, and FP8 with `_scale_inv`. All become [E, P, ...], gate before up.
"""

from __future__ import annotations

from torch import Tensor

from fanfold.errors import MissingExpertsError, TensorError, UnsupportedError
from fanfold.formats.codec import check_matrix, check_values
from fanfold.formats.config import ModelConfig
from fanfold.formats.experts import LayerTensors, ProjectionInfo, finite
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


def describe_fused(
    files: CheckpointFiles, scheme: Scheme, config: ModelConfig, tensors: LayerTensors, projection: str
) -> ProjectionInfo:
    """Format and sizes of one fused projection; only headers are read.

    Raises:
        TensorError: a shape that does not fit E or H of config.json.
        MissingExpertsError, UnsupportedError: as `fused_format`.
    """
    fmt = fused_format(files, scheme, tensors, projection)
    name = tensors.fused[projection]["blocks" if fmt.kind == "mxfp4" else "weight"]
    shape = list(files.infos[name].shape)
    if fmt.kind == "mxfp4" and len(shape) == 4:
        shape = [*shape[:2], shape[2] * shape[3] * 2]  # gpt-oss: [E, rows, K/32, 16] bytes of two codes
    if len(shape) != 3 or config.num_experts not in (None, shape[0]):
        raise TensorError(
            f"{files.path}: {name}",
            found=f"shape {list(files.infos[name].shape)}",
            expected=f"[{config.num_experts or 'E'}, ...] over all experts of config.json",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )
    experts, rows, columns = shape
    if fmt.dense and config.transposed:
        rows, columns = columns, rows
    hidden = columns if projection != "down" else rows
    if config.hidden_size not in (None, hidden):
        raise TensorError(
            f"{files.path}: {name}",
            found=f"shape {list(files.infos[name].shape)}, so H = {hidden}",
            expected=f"H = {config.hidden_size}, stored "
            + ("(E, inputs, outputs)" if config.transposed else "(E, outputs, inputs)"),
            next_step="Another storage order is never guessed from shapes; check model_type and hidden_size.",
        )
    halves = 2 if projection == "gate_up" else 1
    return ProjectionInfo(fmt, experts, halves, rows // halves, columns)


def read_fused(
    files: CheckpointFiles, scheme: Scheme, config: ModelConfig, tensors: LayerTensors, projection: str
) -> ProjectionWeights:
    """The stack of one fused projection.

    Raises:
        TensorError: a shape that does not fit E or H of config.json, or an impossible value.
        MissingExpertsError, UnsupportedError: as `fused_format`.
    """
    info = describe_fused(files, scheme, config, tensors, projection)
    fmt = info.format
    stacks: dict[str, Tensor] = {}
    for suffix, name in tensors.fused[projection].items():
        tensor = finite(files, name) if suffix == "bias" else files.read(name)
        if FIELDS[suffix] == "packed":
            tensor = tensor.flatten(2)
        elif FIELDS[suffix] == "weight" and fmt.dense and config.transposed:
            tensor = tensor.transpose(1, 2)
        stacks[FIELDS[suffix]] = _split(tensor, info.halves, config.interleaved, f"{files.path}: {name}")
    bias = stacks.pop("bias", None)
    weights = ProjectionWeights(fmt, info.n, info.k, stacks, bias)
    for e in range(info.num_experts):
        for p in range(info.halves):
            where = f"{files.path}: {tensors.container}.{projection}[{e}, {p}]"
            check_matrix(fmt, weights.matrix(e, p), info.n, info.k, where)
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
