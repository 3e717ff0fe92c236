"""LaunchConfig: how one launch of a product is cut into programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fanfold.errors import ArgumentError


@dataclass(frozen=True)
class LaunchConfig:
    """Tile and resources of one program.

    Attributes:
        block_n: weight rows (outputs) a program makes; a power of two.
        block_k: inputs contracted a step; a power of two.
        block_t: token rows a program makes; a power of two. The work list is made for it.
        num_warps: warps of 32 threads.
        num_stages: steps whose loads are in flight.
        scale_on_sum: group scales multiply the fp32 sum of a group, so that integer weights stay exact; else
            the weights, which are then rounded to the activations' dtype.
        smallest_t: programs with fewer rows make tiles of block_t / 2 or / 4, down to this; None: block_t.
    """

    block_n: int
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int
    scale_on_sum: bool = False
    smallest_t: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_n", "block_k", "block_t", "num_warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ArgumentError(
                    f"LaunchConfig.{name}",
                    found=str(value),
                    expected="a power of two",
                    next_step="Take a config of the tables: fanfold.kernels.grouped.configs.",
                )
        if self.smallest_t is not None and self.smallest_t not in [self.block_t >> i for i in range(3)]:
            raise ArgumentError(
                "LaunchConfig.smallest_t",
                found=f"{self.smallest_t} with block_t {self.block_t}",
                expected="block_t, a half or a quarter of it",
                next_step="Take a config of the tables: fanfold.kernels.grouped.configs.",
            )
        if self.num_stages < 1:
            raise ArgumentError(
                "LaunchConfig.num_stages",
                found=str(self.num_stages),
                expected="at least 1",
                next_step="Take a config of the tables: fanfold.kernels.grouped.configs.",
            )

    @property
    def name(self) -> str:
        """E.g. `n64-k128-t16-w4-s4`, with `-sum` where scales multiply the sum, `-from16` for smallest_t."""
        parts = asdict(self)
        short = zip("nktws", list(parts.values())[:5], strict=True)
        name = "-".join(f"{letter}{value}" for letter, value in short) + ("-sum" if self.scale_on_sum else "")
        return name if self.smallest_t in (None, self.block_t) else f"{name}-from{self.smallest_t}"
