"""ExpertShape: the sizes of one expert layer."""

from __future__ import annotations

from dataclasses import dataclass

from fanfold.errors import ArgumentError


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert layer.

    Attributes:
        num_experts: E, experts of the layer.
        hidden: H, inputs of gate and up, outputs of down.
        intermediate: I, outputs of gate and of up, inputs of down.
        gated: gate and up (2 halves) or up alone (1).
    """

    num_experts: int
    hidden: int
    intermediate: int
    gated: bool = True

    def __post_init__(self) -> None:
        for name in ("num_experts", "hidden", "intermediate"):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name != "num_experts"):
                raise ArgumentError(
                    f"ExpertShape.{name}",
                    found=str(value),
                    expected="a positive number",
                    next_step="Pass the sizes of the model's config.json.",
                )

    @property
    def halves(self) -> int:
        """Products that read the layer's input: 2 (gate, up) or 1 (up alone)."""
        return 2 if self.gated else 1
