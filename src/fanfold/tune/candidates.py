"""Candidates: configs of both products of a layer, and those that differ from one in a single field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.configs import Sizes, fit
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weight_format import WeightFormat

Config = LaunchConfig | Sm90Config
Ladders = Mapping[str, Sequence[Any]]
"""Field -> the values that are tried, in order."""
MOST_SUMS = 128
"""fp32 sums that a thread holds; more leave no registers for operands."""

GROUPED: Ladders = {
    "block_n": (32, 64, 128, 256),
    "block_k": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (1, 2, 3, 4, 5),
    "scale_on_sum": (False, True),
}
SM90: Ladders = {
    "warpgroups": (1, 2, 4),
    "slabs": (1, 2),
    "block_k": (64, 128, 256, 512),
    "stages": (2, 3, 4, 5, 6),
    "together": (1, 2, 4, 8, 16),
    "scale_on_sum": (False, True),
    "parts": (1, 2, 3, 4, 6, 8),
}
TILES = {LaunchConfig: (16, 32, 64, 128), Sm90Config: (8, 16, 32, 64, 128, 256)}
"""Values of block_t, which both products share."""


@dataclass(frozen=True)
class Candidate:
    """What a layer is tried with.

    Attributes:
        gate_up, down: configs of one kind, with one block_t; smallest_t is a number.
        chained: whether launches are chained; None: the kernel decides.
    """

    gate_up: Config
    down: Config
    chained: bool | None = None

    @property
    def name(self) -> str:
        """Both configs' names."""
        return f"{self.gate_up.name}, {self.down.name}" + (", chained" if self.chained else "")

    @property
    def settings(self) -> dict[str, Any]:
        """As a row of a table has it."""
        found: dict[str, Any] = {"gate_up": asdict(self.gate_up), "down": asdict(self.down)}
        return found if self.chained is None else {"chained": self.chained, **found}

    @property
    def forced(self) -> tuple[Any, ...]:
        """As an implementation takes it."""
        configs = self.gate_up, self.down
        return configs if self.chained is None else (*configs, self.chained)


def grouped_candidate(gate_up: LaunchConfig, down: LaunchConfig) -> Candidate:
    """Of the portable product."""
    first, second = (replace(config, smallest_t=config.smallest_t or config.block_t) for config in (gate_up, down))
    return Candidate(first, second)


def grouped_fits(gate_up: tuple[WeightFormat, int, int], down: tuple[WeightFormat, int, int]) -> Fits:
    """Whether configs suit a layer, as far as that can be said without compiling them.

    Args:
        gate_up: format, K, and the products that a program sums: 2 for gate and up.
        down: the same, of down.
    """

    def fits(candidate: Candidate) -> bool:
        for config, (fmt, k, sums) in ((candidate.gate_up, gate_up), (candidate.down, down)):
            assert isinstance(config, LaunchConfig)
            run = fmt.run(k)
            if config.scale_on_sum and (fmt.dense or run == 0 or run % config.block_k):
                return False
            if sums * config.block_n * config.block_t > MOST_SUMS * 32 * config.num_warps:
                return False
        return True

    return fits


def sm90_fits(gate_up: Sizes, down: Sizes) -> Fits:
    """Whether the Hopper product takes configs for weights of these sizes as they are."""

    def fits(candidate: Candidate) -> bool:
        assert isinstance(candidate.gate_up, Sm90Config)
        assert isinstance(candidate.down, Sm90Config)
        return (
            fit(candidate.gate_up, gate_up, gate_up=True) == candidate.gate_up
            and fit(candidate.down, down, gate_up=False) == candidate.down
        )

    return fits


Fits = Callable[[Candidate], bool]


def neighbours(candidate: Candidate, fits: Fits) -> list[Candidate]:
    """Candidates that differ in one field of one product, or of both in block_t, by one step; those that fit."""
    return [found for found in _steps(candidate) if fits(found)]


def _steps(candidate: Candidate) -> Iterator[Candidate]:
    first, second = candidate.gate_up, candidate.down
    for tile in _beside(TILES[type(first)], first.block_t):
        pair = [_made(config, block_t=tile, **_smallest(config, tile)) for config in (first, second)]
        if pair[0] is not None and pair[1] is not None:
            yield replace(candidate, gate_up=pair[0], down=pair[1])
    for side in ("gate_up", "down"):
        config: Config = getattr(candidate, side)
        ladders = GROUPED if isinstance(config, LaunchConfig) else SM90
        smallest = tuple(config.block_t >> shift for shift in (2, 1, 0))
        for name, values in {**ladders, "smallest_t": smallest}.items():
            for value in _beside(values, getattr(config, name)):
                made = _made(config, **{name: value})
                if made is not None:
                    yield replace(candidate, **{side: made})
    if candidate.chained is not None:
        yield replace(candidate, chained=not candidate.chained)


def _smallest(config: Config, tile: int) -> dict[str, int]:
    """smallest_t that is the same part of another tile, as far as there is such a tile."""
    part = config.block_t // (config.smallest_t or config.block_t)
    return {"smallest_t": max(tile // part, TILES[type(config)][0])}


def _beside(values: Sequence[Any], value: Any) -> list[Any]:
    """The next smaller and the next larger of some values in order."""
    smaller, larger = [v for v in values if v < value], [v for v in values if v > value]
    return smaller[-1:] + larger[:1]


def _made(config: Config, **fields: Any) -> Config | None:
    """The config with other fields; None where no kernel has it."""
    try:
        return replace(config, **fields)
    except ArgumentError:
        return None
