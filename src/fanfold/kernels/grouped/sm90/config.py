"""How one launch of the Hopper product is cut into programs, and whether that fits the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped.sm90.fragments import TILE
from fanfold.kernels.grouped.sm90.supported import FP4_GROUPS
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.spec.weight_format import WeightFormat

BLOCK_T = (8, 16, 32, 64, 128, 256)
BLOCK_K = (512, 256, 128, 64)
WHOLE_GROUP = 64
"""Fewest inputs of a group whose sum can be scaled: one tile."""


@dataclass(frozen=True)
class Sm90Config:
    """Tile and resources of one program.

    Attributes:
        block_t: most token rows of a program; the work list is made for it.
        smallest_t: programs with fewer rows take tiles of block_t / 2 or / 4, down to this.
        warpgroups: of 128 threads, 64 weight rows each.
        slabs: times that many weight rows a program makes, 1 or 2.
        block_k: inputs a stage.
        stages: stages of activations in shared memory.
        together: work items that pass one weight tile one after the other; 1: weights are read once.
        scale_on_sum: group scales multiply the fp32 sum of a group; else the weights.
        parts: programs that share K of one output tile; their sums are added by the weighted sum.
    """

    block_t: int
    smallest_t: int
    warpgroups: int
    slabs: int
    block_k: int
    stages: int
    together: int
    scale_on_sum: bool
    parts: int = 1

    def __post_init__(self) -> None:
        wanted = {
            "block_t": BLOCK_T,
            "smallest_t": tuple(t for t in (self.block_t, self.block_t // 2, self.block_t // 4) if t >= BLOCK_T[0]),
            "warpgroups": (1, 2, 4),
            "slabs": (1, 2),
            "block_k": BLOCK_K,
            # Where weights are scaled, the product of the step before is still reading when a stage is filled.
            "stages": tuple(range(2 if self.scale_on_sum else 3, 9)),
            "together": tuple(range(1, 17)),
            "parts": tuple(range(1, 17)),
        }
        for name, values in wanted.items():
            if getattr(self, name) not in values:
                raise ArgumentError(
                    f"Sm90Config.{name}",
                    found=str(getattr(self, name)),
                    expected=f"one of {values}",
                    next_step="Take a config of the tuned table.",
                )

    @property
    def rows(self) -> int:
        """Weight rows of a program."""
        return TILE * self.warpgroups * self.slabs

    @property
    def name(self) -> str:
        """E.g. `t32-8-w1x2-k128-s3-sum`; -g: together, -p: parts."""
        parts = [f"t{self.block_t}"]
        if self.smallest_t < self.block_t:
            parts.append(str(self.smallest_t))
        parts += [f"w{self.warpgroups}x{self.slabs}", f"k{self.block_k}", f"s{self.stages}"]
        parts += [f"g{self.together}"] if self.together > 1 else []
        parts += ["sum"] if self.scale_on_sum else []
        parts += [f"p{self.parts}"] if self.parts > 1 else []
        return "-".join(parts)


@cache
def misfits(config: Sm90Config, fmt: WeightFormat, rows: int, k: int, gate_up: bool) -> tuple[str, ...]:
    """What a config expects of weights [rows, k], both padded, and does not find; empty where it fits.

    Args:
        config: tile sizes.
        fmt: of the weights.
        rows: weight rows of an expert.
        k: inputs.
        gate_up: the first product of a layer; else down.
    """
    fp4 = fmt.kind in FP4_GROUPS
    group = WHOLE_GROUP if fp4 else fmt.group_size
    inputs = k // config.parts
    steps = inputs // config.block_k
    tiles = config.block_k // TILE * config.slabs * steps
    wanted = {
        f"weight rows in multiples of {config.rows}": rows % config.rows == 0,
        f"K in multiples of {config.block_k * config.parts}": k % (config.block_k * config.parts) == 0,
        "at least two steps of block_k": steps >= 2,
        "whole groups in each part of K": inputs % group == 0,
        "block_k that holds whole groups, of 64 or more": not config.scale_on_sum
        or (group >= WHOLE_GROUP and config.block_k % group == 0 and not fp4),
        # Two fragments take turns as the operand of products in flight; of one turn alone the compiler makes nothing.
        "an even number of tiles, four or more": config.scale_on_sum or (tiles % 2 == 0 and tiles >= 4),
        "one part, for gate_up and for fp4": config.parts == 1 or not (gate_up or fp4),
    }
    return tuple(expected for expected, good in wanted.items() if not good)


def check_config(op: str, config: Sm90Config, weights: FragmentWeights, gate_up: bool) -> None:
    """Whether the tiles divide the weights, and a stage the groups.

    Raises:
        ArgumentError: they do not.
    """
    found = misfits(config, weights.format, weights.rows, weights.padded_k, gate_up)
    if found:
        raise ArgumentError(
            f"{op}: config",
            found=f"{config.name} for {weights.format} [{weights.rows}, {weights.padded_k}]",
            expected=found[0],
            next_step="Take the config that config_for gives for these weights.",
        )
