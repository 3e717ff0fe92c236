"""Fused experts: one tensor holds all experts of a projection.

Met: dense `gate_up_proj`/`down_proj` (also transposed and interleaved, Granite's `input_linear`/`output_linear`),
gpt-oss's MXFP4 `gate_up_proj_blocks`/`_scales`, and FP8 with `_scale_inv`. All become [E, P, ...], gate before up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fanfold.errors import MissingExpertsError, TensorError, UnsupportedError
from fanfold.formats.codec import check_matrix, check_values
from fanfold.formats.config import ModelConfig
from fanfold.formats.experts import LayerTensors, ProjectionInfo, finite
from fanfold.formats.files import CheckpointFiles
from fanfold.formats.header import TensorInfo
from fanfold.formats.matrix import check_bias, dense_format, refuse_plain
from fanfold.formats.schemes import Scheme
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights

# Canonical names of the tensors of each layout.
DENSE_FIELDS = {"weight": "weight"}
LAYOUTS: Mapping[str, Mapping[str, str]] = {
    "mxfp4": {"blocks": "packed", "scales": "scale"},
    "fp8": {"weight": "weight", "scale_inv": "scale"},
}


@dataclass(frozen=True)
class FusedExperts:
    """One projection, found by its headers.

    Attributes:
        info: format and sizes.
        fields: canonical name -> tensor name.
        bias: name of the bias [E, P*N], where there is one.
        transposed: whether the weight is stored (E, inputs, outputs).
        interleaved: whether rows alternate between gate and up.
        experts: those that are read, by their place in the file.
    """

    info: ProjectionInfo
    fields: Mapping[str, str]
    bias: str | None
    transposed: bool
    interleaved: bool
    experts: tuple[int, ...]

    def of(self, experts: Sequence[int]) -> FusedExperts:
        """Some experts alone, in that order."""
        chosen = tuple(self.experts[expert] for expert in experts)
        return replace(self, info=replace(self.info, num_experts=len(chosen)), experts=chosen)

    def describe(self, files: CheckpointFiles) -> ProjectionInfo:
        """Format and sizes."""
        return self.info

    def read(self, files: CheckpointFiles) -> ProjectionWeights:
        """The stack [E, P, ...].

        Beside the stack, one expert is in memory at a time.

        Raises:
            TensorError: an impossible value.
        """
        info = self.info
        size = (info.num_experts, info.halves)
        stacks: dict[str, Tensor] = {}
        bias = None
        for e, row in enumerate(self.experts):
            for field, name in self.fields.items():
                halves = self._halves(files.read(name, row))
                if field not in stacks:
                    stacks[field] = halves.new_empty((*size, *halves.shape[1:]))
                stacks[field][e] = halves
            for p in range(info.halves):
                matrix = {field: stack[e, p] for field, stack in stacks.items()}
                check_values(info.format, matrix, f"{files.path}: {self.fields[next(iter(matrix))]}[{row}, {p}]")
            if self.bias is not None:
                halves = self._halves(finite(files, self.bias, row))
                bias = halves.new_empty((*size, info.n)) if bias is None else bias
                bias[e] = halves
        return ProjectionWeights(info.format, info.n, info.k, stacks, bias)

    def _halves(self, tensor: Tensor) -> Tensor:
        """[P*rows, ...] of one expert -> [P, rows, ...], gate before up."""
        if tensor.dim() == 3:
            tensor = tensor.flatten(1)  # gpt-oss's blocks: [rows, K/32, 16]
        if tensor.dim() == 2 and self.transposed:
            tensor = tensor.T
        halves = self.info.halves
        if self.interleaved and halves == 2:
            return torch.stack((tensor[0::2], tensor[1::2]))
        return tensor.reshape(halves, tensor.shape[0] // halves, *tensor.shape[1:])


def find_fused(
    files: CheckpointFiles, scheme: Scheme, config: ModelConfig, tensors: LayerTensors, projection: str
) -> FusedExperts:
    """One fused projection (`gate_up`, `up` or `down`); only headers are read.

    Raises:
        ConfigError: plain where the config says packed.
        MissingExpertsError: the layer has no such projection.
        TensorError: a shape that does not fit E or H of config.json, or a wrong dtype.
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
    infos = {suffix: files.infos[name] for suffix, name in suffixes.items() if suffix != "bias"}
    fmt = _format(files, scheme, config, tensors, projection, infos)
    fields = {field: suffixes[suffix] for suffix, field in LAYOUTS.get(fmt.kind, DENSE_FIELDS).items()}
    codes = files.infos[fields["packed" if fmt.kind == "mxfp4" else "weight"]]
    transposed = fmt.dense and _transposed(files, config, projection, codes, suffixes)
    info = _info(files, config, projection, fmt, codes, suffixes, transposed)
    one_half = {
        field: TensorInfo(files.infos[name].dtype, _half_shape(files, name, info, transposed), files.path, 0)
        for field, name in fields.items()
    }
    where = f"{files.path}: {tensors.container}.{projection}, one half of one expert"
    check_matrix(fmt, one_half, info.n, info.k, where)
    bias = suffixes.get("bias")
    if bias is not None:
        check_bias(files, bias, (info.num_experts, info.halves * info.n))
    return FusedExperts(info, fields, bias, transposed, config.interleaved, tuple(range(info.num_experts)))


def _format(
    files: CheckpointFiles,
    scheme: Scheme,
    config: ModelConfig,
    tensors: LayerTensors,
    projection: str,
    infos: Mapping[str, TensorInfo],
) -> WeightFormat:
    where = f"{files.path}: {tensors.container}: {projection}"
    fmt = scheme(tensors.container)
    dense = dense_format(infos)
    if dense is not None:
        refuse_plain(where, dense, fmt)
        return dense
    if fmt is None or set(LAYOUTS.get(fmt.kind, ())) != set(infos):
        raise UnsupportedError(
            where,
            found=f"{', '.join(sorted(infos)) or 'no weight'} with {fmt or 'no quantization config for it'}",
            expected="plain weights, MXFP4 blocks and scales, or FP8 weights with scale_inv",
            next_step="Save the checkpoint with one tensor an expert, or in one of these layouts.",
        )
    if fmt.kind == "fp8" and (config.transposed or config.interleaved):
        raise UnsupportedError(
            where,
            found=f"fused FP8 weights of {config.model_type}, which stores experts transposed or interleaved",
            expected="fused FP8 weights stored (E, outputs, inputs), gate above up",
            next_step="Save the checkpoint with one tensor an expert.",
        )
    return fmt


def _transposed(
    files: CheckpointFiles, config: ModelConfig, projection: str, weight: TensorInfo, suffixes: Mapping[str, str]
) -> bool:
    """Whether a dense weight is stored (E, inputs, outputs).

    Raises:
        TensorError: the family is met in either order, and H does not tell which one this is.
    """
    if not config.either_order:
        return config.transposed
    hidden = [axis for axis in (1, 2) if len(weight.shape) == 3 and weight.shape[axis] == config.hidden_size]
    if len(hidden) != 1:
        raise TensorError(
            f"{files.path}: {next(iter(suffixes.values()))}",
            found=f"shape {list(weight.shape)}",
            expected=f"H = {config.hidden_size} on one of the last two axes and not on the other",
            next_step="Experts of this family are met in either order; save the checkpoint with one tensor an expert.",
        )
    return hidden == [1] if projection != "down" else hidden == [2]


def _info(
    files: CheckpointFiles,
    config: ModelConfig,
    projection: str,
    fmt: WeightFormat,
    codes: TensorInfo,
    suffixes: Mapping[str, str],
    transposed: bool,
) -> ProjectionInfo:
    """Sizes, from the tensor that holds the codes."""
    name = f"{files.path}: {next(iter(suffixes.values()))}"
    shape = list(codes.shape)
    if fmt.kind == "mxfp4" and len(shape) == 4:
        shape = [*shape[:2], shape[2] * shape[3] * 2]  # [E, rows, K/32, 16] bytes of two codes
    elif fmt.kind == "mxfp4":
        shape = []
    if len(shape) != 3 or shape[0] == 0 or config.num_experts not in (None, shape[0]):
        raise TensorError(
            name,
            found=f"shape {list(codes.shape)}",
            expected=f"{'four' if fmt.kind == 'mxfp4' else 'three'} axes, the first over the "
            f"{config.num_experts or ''} experts of config.json",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )
    experts, rows, columns = shape
    if transposed:
        rows, columns = columns, rows
    hidden = columns if projection != "down" else rows
    if config.hidden_size not in (None, hidden):
        raise TensorError(
            name,
            found=f"shape {list(codes.shape)}, so H = {hidden}",
            expected=f"H = {config.hidden_size}, stored "
            + ("(E, inputs, outputs)" if transposed else "(E, outputs, inputs)"),
            next_step="Another storage order is never guessed from shapes; check model_type and hidden_size.",
        )
    halves = 2 if projection == "gate_up" else 1
    if rows % halves:
        raise TensorError(
            name,
            found=f"{rows} rows of gate and up",
            expected="an even number, half of them for each",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )
    return ProjectionInfo(fmt, experts, halves, rows // halves, columns)


def _half_shape(files: CheckpointFiles, name: str, info: ProjectionInfo, transposed: bool) -> tuple[int, ...]:
    """The shape of one half of one expert, for a check against the format.

    Raises:
        TensorError: the first axis is not over the experts, or gate and up share rows of scale blocks.
    """
    shape = files.infos[name].shape
    if not shape or shape[0] != info.num_experts:
        raise TensorError(
            f"{files.path}: {name}",
            found=f"shape {list(shape)}",
            expected=f"[{info.num_experts}, ...], one entry an expert",
            next_step="The file is damaged: fetch it again.",
        )
    shape = shape[1:]
    if len(shape) == 3:
        shape = (shape[0], shape[1] * shape[2])
    if len(shape) == 2 and transposed:
        shape = (shape[1], shape[0])
    if len(shape) != 2:
        return shape
    block = info.format.block
    if info.halves == 2 and block is not None and block[0] > 0 and name.endswith("_scale_inv"):
        _check_scale_rows(f"{files.path}: {name}", shape[0], info.n, block[0])
    return shape[0] // info.halves, shape[1]


def _check_scale_rows(where: str, rows: int, n: int, block: int) -> None:
    """Refuses scales of gate_up whose blocks may run across the border between gate and up.

    Blocks of each half alone give 2 * ceil(N / block) rows, blocks over both ceil(2N / block).
    """
    apart, together = 2 * -(-n // block), -(-2 * n // block)
    if rows == apart and (n % block == 0 or apart != together):
        return
    raise TensorError(
        where,
        found=f"{rows} rows of scales for gate and up of {n} rows each, blocks of {block} rows",
        expected=f"{apart} rows of scales, from blocks that gate and up do not share",
        next_step="Save the checkpoint with one tensor an expert; which block is whose is never guessed.",
    )
