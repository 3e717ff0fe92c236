"""Experts of one layer: from the tensors of a checkpoint to packed stacks [E, P, ...]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fanfold.errors import MissingExpertsError, TensorError
from fanfold.formats.files import CheckpointFiles
from fanfold.formats.matrix import Matrix, find_matrix, read_matrix
from fanfold.formats.schemes import Scheme
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights


@dataclass(frozen=True)
class ProjectionInfo:
    """What headers say of one projection: format, E, halves (2 for gate and up), and N x K of one half."""

    format: WeightFormat
    num_experts: int
    halves: int
    n: int
    k: int


@dataclass
class LayerTensors:
    """Names of the expert tensors of one layer.

    Attributes:
        container: module of all experts.
        layer: its number.
        per_expert: (projection, expert) -> suffix -> tensor name, for experts that are one Linear each.
        fused: projection -> suffix -> tensor name, where one tensor holds all experts.
    """

    container: str
    layer: int
    per_expert: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict[tuple[str, int], dict[str, str]])
    fused: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    def names(self) -> Iterable[str]:
        """All tensor names."""
        for suffixes in (*self.per_expert.values(), *self.fused.values()):
            yield from suffixes.values()

    @property
    def gated(self) -> bool:
        """Whether there is a gate beside up."""
        return "gate_up" in self.fused or any(projection == "gate" for projection, _ in self.per_expert)


def find_experts(
    files: CheckpointFiles,
    scheme: Scheme,
    tensors: LayerTensors,
    projections: tuple[str, ...],
    num_experts: int | None,
) -> list[tuple[Matrix, ...]]:
    """The matrices of some projections, for each expert in order; only headers are read.

    Args:
        files: the checkpoint.
        scheme: what its config says of each module.
        tensors: the layer's tensors.
        projections: `("gate", "up")`, `("up",)` or `("down",)`.
        num_experts: E by the config, where it says.

    Raises:
        MissingExpertsError: an expert or one of its projections is absent.
        TensorError: more experts than the config says; two matrices differ in sizes or format.
    """
    present = {expert for _, expert in tensors.per_expert}
    count = num_experts if num_experts is not None else max(present, default=-1) + 1
    extra = sorted(present - set(range(count)))
    if extra:
        raise TensorError(
            f"{files.path}: {tensors.container}.{extra[0]}",
            found=f"an expert number of {extra[-1]}",
            expected=f"numbers below {count}, the experts that config.json states",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )
    missing = [
        f"{expert}.{projection}"
        for expert in range(count)
        for projection in projections
        if (projection, expert) not in tensors.per_expert
    ]
    if missing:
        raise MissingExpertsError(
            f"{files.path}: {tensors.container}",
            found=f"no {', '.join(missing[:4])}" + (f" and {len(missing) - 4} more" if len(missing) > 4 else ""),
            expected=f"{' and '.join(projections)} of all {count} experts",
            next_step="Fetch the missing shards. Experts are never filled with random weights.",
        )
    rows = [
        tuple(_find(files, scheme, tensors.per_expert[projection, expert]) for projection in projections)
        for expert in range(count)
    ]
    first = rows[0][0]
    for row in rows:
        for matrix in row:
            if (matrix.format, matrix.n, matrix.k) != (first.format, first.n, first.k):
                raise TensorError(
                    f"{files.path}: {matrix.module}",
                    found=f"{matrix.format} [{matrix.n}, {matrix.k}]",
                    expected=f"{first.format} [{first.n}, {first.k}], as {first.module} is",
                    next_step="Experts of one projection share one format; requantise the odd ones.",
                )
    return rows


def read_projection(files: CheckpointFiles, rows: list[tuple[Matrix, ...]]) -> ProjectionWeights:
    """The stack of these matrices: each field of the file as [E, P, *shape in the file].

    Raises:
        TensorError: an impossible value, or fields that not all experts have.
    """
    first = rows[0][0]
    size = (len(rows), len(rows[0]))
    stacks: dict[str, Tensor] = {}
    orders: dict[tuple[int, int], Tensor] = {}
    formats: set[WeightFormat] = set()
    for e, row in enumerate(rows):
        for p, matrix in enumerate(row):
            fmt, tensors = read_matrix(files, matrix)
            formats.add(fmt)
            if fmt.kind in ("gptq", "awq") and fmt.symmetric:
                tensors.pop("qzeros", None)  # symmetric means 2^(bits-1), whatever the file holds
            if "g_idx" in tensors:
                orders[e, p] = tensors.pop("g_idx")
            if not stacks:
                stacks = {name: t.new_empty((*size, *t.shape)) for name, t in tensors.items()}
            _check_same(files, matrix, first, stacks, tensors)
            for name, tensor in tensors.items():
                stacks[name][e, p] = tensor
    fmt = first.format
    if orders:
        fmt = replace(fmt, act_order=True)
        stacks["g_idx"] = _orders(fmt, orders, size, first.k)
    return ProjectionWeights(fmt, first.n, first.k, stacks, _biases(files, rows))


def _find(files: CheckpointFiles, scheme: Scheme, suffixes: Mapping[str, str]) -> Matrix:
    suffix, name = next(iter(suffixes.items()))
    return find_matrix(files, scheme, name.removesuffix("." + suffix), suffixes)


def _check_same(
    files: CheckpointFiles,
    matrix: Matrix,
    first: Matrix,
    stacks: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
) -> None:
    for name in sorted(set(stacks) | set(tensors)):
        found = f"{tensors[name].dtype}" if name in tensors else "no such tensor"
        expected = f"{stacks[name].dtype}" if name in stacks else "no such tensor"
        if found != expected:
            raise TensorError(
                f"{files.path}: {matrix.module}: {name}",
                found=found.removeprefix("torch."),
                expected=f"{expected.removeprefix('torch.')}, as {first.module} has",
                next_step="Experts of one projection share one format; requantise the odd ones.",
            )


def _orders(fmt: WeightFormat, orders: Mapping[tuple[int, int], Tensor], size: tuple[int, int], k: int) -> Tensor:
    """g_idx int32 [E, P, K]; one storage for gate and up where they share their order, as writers have it."""
    groups = k if fmt.group_size == -1 else fmt.group_size
    plain = (torch.arange(k) // groups).to(torch.int32)
    rows = [[orders.get((e, p), plain) for p in range(size[1])] for e in range(size[0])]
    if all(torch.equal(order, row[0]) for row in rows for order in row):
        return torch.stack([row[0] for row in rows]).unsqueeze(1).expand(*size, k)
    return torch.stack([torch.stack(row) for row in rows])


def _biases(files: CheckpointFiles, rows: list[tuple[Matrix, ...]]) -> Tensor | None:
    names = [matrix.bias for row in rows for matrix in row]
    if all(name is None for name in names):
        return None
    without = [matrix.module for row in rows for matrix in row if matrix.bias is None]
    if without:
        raise MissingExpertsError(
            f"{files.path}: {without[0]}.bias",
            found="no such tensor",
            expected="a bias, as other experts of the layer have one",
            next_step="Fetch the missing shards.",
        )
    return torch.stack([torch.stack([finite(files, matrix.bias or "") for matrix in row]) for row in rows])


def finite(files: CheckpointFiles, name: str) -> Tensor:
    """A tensor of plain numbers.

    Raises:
        TensorError: one of them is NaN or infinite.
    """
    tensor = files.read(name)
    if not bool(torch.isfinite(tensor).all()):
        raise TensorError(
            f"{files.path}: {name}",
            found=f"{int((~torch.isfinite(tensor)).sum())} values that are NaN or infinite",
            expected="finite numbers",
            next_step="The file is damaged: fetch it again.",
        )
    return tensor
