"""ExpertWeights: the packed weights of one layer's experts, as they lie on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.activation_format import PLAIN
from fanfold.spec.shape import ExpertShape
from fanfold.spec.weight_format import WeightFormat


@dataclass(frozen=True, eq=False)
class ProjectionWeights:
    """One projection (gate_up or down) of all experts of a layer.

    Every tensor is the file's tensor of one expert and half, stacked: [E, P, *shape in the file], P = 2 for gate_up
    (gate, up), 1 for down and for up without a gate. The names are the format's own (`formats/<kind>.py` lists them).

    Attributes:
        format: how each W [N, K] is packed.
        n: outputs of one half.
        k: inputs.
        tensors: name -> [E, P, ...].
        bias: [E, P, N] or None.
        activations: what the checkpoint says that its activations are quantised to: `plain`, `nvfp4`, or a name as
            `fanfold inspect` shows it, such as `fp8-static`.
    """

    format: WeightFormat
    n: int
    k: int
    tensors: Mapping[str, Tensor]
    bias: Tensor | None = None
    activations: str = PLAIN

    def __post_init__(self) -> None:
        leading = {name: tuple(t.shape[:2]) for name, t in self.tensors.items()}
        if self.bias is not None:
            leading["bias"] = tuple(self.bias.shape[:2])
        if len(set(leading.values())) != 1:
            raise ArgumentError(
                "ProjectionWeights.tensors",
                found=f"leading sizes {leading}",
                expected="one (experts, halves) for all tensors",
                next_step="Stack every tensor over the same experts.",
            )

    @property
    def num_experts(self) -> int:
        """E."""
        return next(iter(self.tensors.values())).shape[0]

    @property
    def halves(self) -> int:
        """P: 2 for gate and up, else 1."""
        return next(iter(self.tensors.values())).shape[1]

    @property
    def nbytes(self) -> int:
        """Resident bytes, each storage counted once (a g_idx that gate and up share is one)."""
        tensors = [*self.tensors.values(), *([] if self.bias is None else [self.bias])]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    def matrix(self, expert: int, half: int) -> dict[str, Tensor]:
        """The tensors of one W [N, K], in the shapes of the file."""
        return {name: t[expert, half] for name, t in self.tensors.items()}


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The experts of one layer: gate_up [E, 2 or 1, I, H] and down [E, 1, H, I], packed."""

    gate_up: ProjectionWeights
    down: ProjectionWeights

    def __post_init__(self) -> None:
        up, down = self.gate_up, self.down
        if (up.num_experts, up.n, up.k) != (down.num_experts, down.k, down.n) or down.halves != 1:
            raise ArgumentError(
                "ExpertWeights",
                found=f"gate_up E={up.num_experts} N={up.n} K={up.k}; "
                f"down E={down.num_experts} N={down.n} K={down.k} halves={down.halves}",
                expected="down [H, I] for gate_up [I, H], over the same experts",
                next_step="Pass both projections of one layer.",
            )

    @property
    def shape(self) -> ExpertShape:
        """The layer's sizes."""
        return ExpertShape(self.gate_up.num_experts, self.gate_up.k, self.gate_up.n, self.gate_up.halves == 2)

    @property
    def nbytes(self) -> int:
        """Resident bytes."""
        return self.gate_up.nbytes + self.down.nbytes
