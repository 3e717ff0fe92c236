"""A packed projection as arguments of an operation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights

Packed = tuple[str, Sequence[str], Sequence[Tensor], Tensor | None, int, int]
"""The name of the format, the names of its tensors, the tensors [E, P, ...], bias, N, K: see ProjectionWeights."""


def schema(prefix: str = "") -> str:
    """The arguments in a schema, each name behind the prefix."""
    kinds = {"format": "str", "names": "str[]", "tensors": "Tensor[]", "bias": "Tensor?", "n": "int", "k": "int"}
    return ", ".join(f"{kind} {prefix}{name}" for name, kind in kinds.items())


def packed(projection: ProjectionWeights) -> Packed:
    """The arguments that hand over a projection."""
    tensors = projection.tensors
    return (
        projection.format.name,
        list(tensors),
        list(tensors.values()),
        projection.bias,
        projection.n,
        projection.k,
    )


def projection_of(
    name: str, names: Sequence[str], tensors: Sequence[Tensor], bias: Tensor | None, n: int, k: int
) -> ProjectionWeights:
    """The projection that the arguments hand over."""
    return ProjectionWeights(WeightFormat.parse(name), n, k, dict(zip(names, tensors, strict=True)), bias)
