"""Which configs a layer runs with, by its sizes and number of rows: pure, on the host, from the tuned table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import log

from fanfold.errors import UnavailableError
from fanfold.kernels.common.tables import REACH
from fanfold.kernels.grouped.sm90.config import BLOCK_K, Sm90Config, misfits
from fanfold.kernels.grouped.sm90.supported import FP4_GROUPS
from fanfold.kernels.grouped.sm90.tuned import TunedLayer, all_rows
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.spec.weight_format import WeightFormat

Sizes = tuple[WeightFormat, int, int]  # format, padded rows, padded K
LARGEST_BLOCK_K = 128
"""Where scales move from the sum to the weights: they need more registers there."""
MOST_SCALES = 4
"""Scales (of all slabs) a stage that a thread holds for a row, where they are on the sum; more spill."""
LEAST_ON_WEIGHTS = 32
"""Rows of a tile from which on scales go to the weights where that takes few instructions (short scales), or where the
sum takes many (zero points). The package's rows of integers were measured with neither."""
FAMILIES = {"int4": ("int4",), "nvfp4": ("nvfp4", "mxfp4"), "mxfp4": ("mxfp4", "nvfp4")}
"""Formats whose rows of the table are taken, by preference."""


@dataclass(frozen=True)
class LayerConfigs:
    """What a layer runs with.

    Attributes:
        gate_up, down: configs; both have one `block_t`, that of the work list.
        chained: whether to chain the launches.
        row: of the tuned table, where they come from.
        same: whether the row is of this very layer and format, and of about so many tokens.
    """

    gate_up: Sm90Config
    down: Sm90Config
    chained: bool
    row: TunedLayer
    same: bool


def config_for(
    gate_up: FragmentWeights, down: FragmentWeights, tokens: int, top_k: int, gpu: str | None = None
) -> tuple[Sm90Config, Sm90Config, bool]:
    """Configs of both products of a layer, and whether to chain their launches.

    For a layer of the tuned tables the row with the nearest number of tokens, as far as it reaches; for any other the
    row with the nearest number of rows an expert, changed as little as the sizes need. There is one for all weights
    that `prepare` accepts.

    Args:
        gate_up: the first projection.
        down: the second.
        tokens: T.
        top_k: k.
        gpu: where it runs, whose own table comes first; None: any of sm_90.

    Returns:
        gate_up's config, down's (both have one `block_t`, that of the work list), and `chained`.
    """
    found = configs_of(gate_up, down, tokens, top_k, gpu=gpu)
    return found.gate_up, found.down, found.chained


def pinned_config(
    gate_up: FragmentWeights, down: FragmentWeights, tokens: int, top_k: int
) -> tuple[Sm90Config, Sm90Config, bool]:
    """As `config_for`, for batch-invariant mode: a row's bits do not depend on the number of rows or their place.

    Sums run over K in one order whatever the tile, so tiles may follow the number of rows. What is pinned is where the
    scale is applied (to the weights) and that K is not split. A user's tables are not asked at all.
    """
    found = configs_of(gate_up, down, tokens, top_k, pinned=True)
    return found.gate_up, found.down, found.chained


def configs_of(
    gate_up: FragmentWeights,
    down: FragmentWeights,
    tokens: int,
    top_k: int,
    pinned: bool = False,
    gpu: str | None = None,
) -> LayerConfigs:
    """`layer_configs` of these weights."""
    short = gate_up.short_scales and down.short_scales
    return layer_configs(*sizes_of(gate_up, down), tokens, top_k, pinned=pinned, gpu=gpu, short=short)


def fit(config: Sm90Config, sizes: Sizes, gate_up: bool) -> Sm90Config:
    """The config, changed as little as weights of these sizes need.

    Raises:
        UnavailableError: there is none (never for weights that `prepare` accepts).
    """
    fmt = sizes[0]
    on_weights = _on_weights(config)
    starts = [] if fmt.kind in FP4_GROUPS else [config]
    starts += [on_weights, replace(on_weights, warpgroups=1, slabs=2)]  # the last for K = 128
    for candidate in (near for start in starts for near in _near(start)):
        scales = candidate.block_k // fmt.group_size * candidate.slabs
        if (not candidate.scale_on_sum or scales <= MOST_SCALES) and not misfits(candidate, *sizes, gate_up):
            return candidate
    raise UnavailableError(
        "Hopper product",
        found=f"{fmt} [{sizes[1]}, {sizes[2]}]",
        expected="rows and K in multiples of 128",
        next_step="Pass what `prepare` made.",
    )


def _on_weights(config: Sm90Config) -> Sm90Config:
    """The config with scales on the weights."""
    if not config.scale_on_sum:
        return config
    block_k = min(config.block_k, LARGEST_BLOCK_K)
    return replace(config, scale_on_sum=False, block_k=block_k, stages=max(3, config.stages))


def _near(config: Sm90Config) -> Iterator[Sm90Config]:
    """The config and changes of it, the least harmful first: shorter stages, fewer rows, fewer parts, stages of 64."""
    for sizes in (BLOCK_K[:-1], BLOCK_K[-1:]):
        for parts in range(config.parts, 0, -1):
            for warpgroups, slabs in _fewer_rows(config.warpgroups, config.slabs):
                for block_k in (size for size in sizes if size <= config.block_k):
                    yield replace(config, warpgroups=warpgroups, slabs=slabs, block_k=block_k, parts=parts)


def _fewer_rows(warpgroups: int, slabs: int) -> list[tuple[int, int]]:
    """Both numbers, and smaller ones: fewer warpgroups first."""
    return [(w, s) for s in range(slabs, 0, -1) for w in (4, 2, 1) if w <= warpgroups]


def sizes_of(gate_up: FragmentWeights, down: FragmentWeights) -> tuple[Sizes, Sizes, int, int, int]:
    """Of both products, and H, I and E: what `layer_configs` asks of weights."""
    first, second = ((weights.format, weights.rows, weights.padded_k) for weights in (gate_up, down))
    return first, second, gate_up.k, gate_up.n, gate_up.num_experts


@cache
def layer_configs(
    gate_up: Sizes,
    down: Sizes,
    hidden: int,
    intermediate: int,
    experts: int,
    tokens: int,
    top_k: int,
    pinned: bool = False,
    gpu: str | None = None,
    short: bool = False,
) -> LayerConfigs:
    """`config_for` (or `pinned_config`) by sizes alone, without weights.

    Args:
        gate_up, down: format, rows and K, both `padded`.
        hidden, intermediate, experts: H, I, E.
        tokens, top_k: T, k.
        pinned: see `pinned_config`.
        gpu: see `config_for`.
        short: whether bf16 holds the scales of integers in both projections.
    """
    family = gate_up[0].kind if gate_up[0].kind in FP4_GROUPS else "int4"
    row, same = _nearest(family, (experts, top_k, hidden, intermediate), max(1, tokens), all_rows(gpu, pinned))
    first, second = row.gate_up, row.down
    cheap = family == "int4" and row.run > 0 and (short or not gate_up[0].symmetric)
    if cheap and first.block_t >= LEAST_ON_WEIGHTS:
        first, second = _on_weights(first), _on_weights(second)
    if pinned:
        first, second = _on_weights(first), replace(_on_weights(second), parts=1)
    first, second = fit(first, gate_up, gate_up=True), fit(second, down, gate_up=False)
    return LayerConfigs(first, second, row.chained, row, same)


def _nearest(
    family: str, layer: tuple[int, int, int, int], tokens: int, all_rows: Sequence[TunedLayer]
) -> tuple[TunedLayer, bool]:
    """The row to start from, of the very layer or with the nearest number of rows an expert, and whether it is that."""
    rows = [row for row in all_rows if row.format in FAMILIES[family]]
    experts, top_k, hidden, intermediate = layer
    same = [
        row
        for row in rows
        if (row.experts, row.top_k, row.hidden, row.intermediate) == layer
        and max(row.tokens, tokens) <= REACH * min(row.tokens, tokens)
    ]
    wanted = tokens * top_k / max(1, experts)

    def distance(row: TunedLayer) -> tuple[float, bool, float]:
        found = row.tokens * row.top_k / row.experts
        size = row.hidden * row.intermediate / (hidden * intermediate)
        return abs(log(found / wanted)), row.format != family, abs(log(size))

    row = min(same or rows, key=distance)
    return row, bool(same) and row.format == family
