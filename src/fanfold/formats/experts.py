"""Experts of one layer, one matrix each: from the tensors of a checkpoint to packed stacks [E, P, ...]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
from torch import Tensor

from fanfold.errors import MissingExpertsError, TensorError
from fanfold.formats.files import CheckpointFiles
from fanfold.formats.matrix import Matrix, find_matrix, is_plain_order, read_matrix
from fanfold.formats.schemes import Scheme
from fanfold.spec.activation_format import PLAIN
from fanfold.spec.weight_format import INTEGER_BITS, WeightFormat
from fanfold.spec.weights import ProjectionWeights

# Zero points, which symmetric formats do not use: theirs is 2^(bits-1), whatever the file holds.
ZEROS = frozenset({"qzeros", "zero_point"})


@dataclass(frozen=True)
class ProjectionInfo:
    """What headers say of one projection: format, E, halves (2 for gate and up), and N x K of one half.

    `activations` is what the config says of them, once the checkpoint has filled it in.
    """

    format: WeightFormat
    num_experts: int
    halves: int
    n: int
    k: int
    activations: str = PLAIN


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
    def projections(self) -> set[str]:
        """The projections that some expert has."""
        return {*self.fused, *(projection for projection, _ in self.per_expert)}

    @property
    def gated(self) -> bool:
        """Whether there is a gate beside up."""
        return not self.projections.isdisjoint({"gate", "gate_up"})


@dataclass(frozen=True)
class ExpertMatrices:
    """One projection, found by its headers: `rows[expert][half]`."""

    rows: tuple[tuple[Matrix, ...], ...]

    @property
    def info(self) -> ProjectionInfo:
        """Format and sizes; `act_order` is False, as no g_idx has been read."""
        first = self.rows[0][0]
        return ProjectionInfo(first.format, len(self.rows), len(self.rows[0]), first.n, first.k)

    def of(self, experts: Sequence[int]) -> ExpertMatrices:
        """Some experts alone, in that order."""
        return ExpertMatrices(tuple(self.rows[expert] for expert in experts))

    def describe(self, files: CheckpointFiles) -> ProjectionInfo:
        """Format and sizes, `act_order` as the first expert's g_idx has it."""
        g_idx = self.rows[0][0].fields.get("g_idx")
        info = self.info
        ordered = g_idx is not None and not is_plain_order(info.format, files.read(g_idx))
        return replace(info, format=replace(info.format, act_order=ordered))

    def read(self, files: CheckpointFiles) -> ProjectionWeights:
        """The stack: each field of the file as [E, P, *shape in the file].

        Beside the stack, one matrix is in memory at a time.

        Raises:
            TensorError: an impossible value, or fields that not all experts have.
        """
        info = self.info
        size = (info.num_experts, info.halves)
        stacks: dict[str, Tensor] = {}
        orders: dict[tuple[int, int], Tensor] = {}
        for e, row in enumerate(self.rows):
            for p, matrix in enumerate(row):
                fmt, tensors = read_matrix(files, matrix)
                if fmt.kind in INTEGER_BITS and fmt.symmetric:
                    tensors = {name: tensor for name, tensor in tensors.items() if name not in ZEROS}
                if "g_idx" in tensors:
                    orders[e, p] = tensors.pop("g_idx")
                if "input_scale" in tensors and "input_scale" not in stacks:
                    # An expert without one keeps 0, which means "scaled by its own largest value".
                    stacks["input_scale"] = tensors["input_scale"].new_zeros(size)
                if (e, p) == (0, 0):
                    for name, tensor in tensors.items():
                        stacks.setdefault(name, tensor.new_empty((*size, *tensor.shape)))
                _check_same(files, matrix, self.rows[0][0], stacks, tensors)
                for name, tensor in tensors.items():
                    stacks[name][e, p] = tensor
        fmt = info.format
        if orders:
            fmt = replace(fmt, act_order=True)
            stacks["g_idx"] = _orders(fmt, orders, size, info.k)
        return ProjectionWeights(fmt, info.n, info.k, stacks, self._biases(files))

    def _biases(self, files: CheckpointFiles) -> Tensor | None:
        """[E, P, N], or None where there are none.

        Raises:
            MissingExpertsError: only some experts have one.
            TensorError: a value that is not finite, or dtypes that differ.
        """
        named = {(e, p): m.bias for e, row in enumerate(self.rows) for p, m in enumerate(row) if m.bias is not None}
        if not named:
            return None
        for e, row in enumerate(self.rows):
            for p, matrix in enumerate(row):
                if (e, p) not in named:
                    raise MissingExpertsError(
                        f"{files.path}: {matrix.module}.bias",
                        found="no such tensor",
                        expected="a bias, as other experts of the layer have one",
                        next_step="Fetch the missing shards.",
                    )
        info, first = self.info, next(iter(named.values()))
        stack = torch.empty((info.num_experts, info.halves, info.n), dtype=files.infos[first].dtype)
        for (e, p), name in named.items():
            tensor = finite(files, name)
            if tensor.dtype != stack.dtype:
                raise _unlike(f"{files.path}: {name}", f"{tensor.dtype}", f"{stack.dtype}", first)
            stack[e, p] = tensor
        return stack


def find_experts(
    files: CheckpointFiles,
    scheme: Scheme,
    tensors: LayerTensors,
    projections: tuple[str, ...],
    num_experts: int | None,
) -> ExpertMatrices:
    """The matrices of some projections, for each expert in order; only headers are read.

    Args:
        files: the checkpoint.
        scheme: what its config says of each module.
        tensors: the layer's tensors.
        projections: `("gate", "up")`, `("up",)` or `("down",)`.
        num_experts: E by the config, where it says.

    Raises:
        ConfigError: packed where the config says plain, or the reverse.
        MissingExpertsError: an expert or one of its projections is absent.
        TensorError: more experts than the config says; two matrices differ in sizes or format.
    """
    present = {expert for _, expert in tensors.per_expert}
    count = num_experts if num_experts is not None else max(present) + 1
    if max(present) >= count:
        raise TensorError(
            f"{files.path}: {tensors.container}.{min(e for e in present if e >= count)}",
            found=f"an expert number of {max(present)}",
            expected=f"numbers below {count}, the experts that config.json states",
            next_step="config.json and the weights are of different checkpoints: fetch both again.",
        )
    wanted = ((p, e) for e in range(count) for p in projections)
    missing = [f"{e}.{p}" for p, e in islice((key for key in wanted if key not in tensors.per_expert), 4)]
    if missing:
        number = count * len(projections) - sum(projection in projections for projection, _ in tensors.per_expert)
        raise MissingExpertsError(
            f"{files.path}: {tensors.container}",
            found=f"no {', '.join(missing)}" + (f" and {number - 4} more" if number > 4 else ""),
            expected=f"{' and '.join(projections)} of all {count} experts",
            next_step="Fetch the missing shards. Experts are never filled with random weights.",
        )
    rows = tuple(
        tuple(_find(files, scheme, tensors.per_expert[projection, expert]) for projection in projections)
        for expert in range(count)
    )
    first = rows[0][0]
    for matrix in (matrix for row in rows for matrix in row):
        if (matrix.format, matrix.n, matrix.k) != (first.format, first.n, first.k):
            raise _unlike(
                f"{files.path}: {matrix.module}",
                f"{matrix.format} [{matrix.n}, {matrix.k}]",
                f"{first.format} [{first.n}, {first.k}]",
                first.module,
            )
    return ExpertMatrices(rows)


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
    for name in sorted({*stacks, *tensors} - {"input_scale"}):
        found = f"{tensors[name].dtype}" if name in tensors else "no such tensor"
        expected = f"{stacks[name].dtype}" if name in stacks else "no such tensor"
        if found != expected:
            raise _unlike(f"{files.path}: {matrix.module}: {name}", found, expected, first.module)


def _unlike(where: str, found: str, expected: str, first: str) -> TensorError:
    return TensorError(
        where,
        found=found.removeprefix("torch."),
        expected=f"{expected.removeprefix('torch.')}, as {first} has",
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


def finite(files: CheckpointFiles, name: str, row: int | None = None) -> Tensor:
    """A tensor of plain numbers, or one `row` of it.

    Raises:
        TensorError: one of them is NaN or infinite.
    """
    tensor = files.read(name, row)
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        raise TensorError(
            f"{files.path}: {name}",
            found=f"{int(bad.sum())} values that are NaN or infinite",
            expected="finite numbers",
            next_step="The file is damaged: fetch it again.",
        )
    return tensor
