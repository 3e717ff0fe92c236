"""Which config a grouped product runs with: one small table a kind of machine.

Those of sm_90 were measured on an H200 (docs/measured.md), sm_100 runs almost the same; the others are chosen by
compiled resources (registers, shared memory, no spills) and count of bytes and steps. Any config of a format gives
right results; they differ in speed and in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weight_format import WeightFormat

Family = Literal["dense", "packed", "w8a8", "fp32"]
"""dense: weights enter the product as they are; packed: they are unpacked in registers; w8a8: FP8 weights and
activations; fp32: fp32 activations, without matrix units."""


@dataclass(frozen=True)
class Table:
    """Configs of a kind of machine: block_t -> config, for a product alone and for one that makes gate and up.

    Both have the same block_k wherever steps are summed by themselves, so that they make the same bits.
    """

    alone: Mapping[Family, Mapping[int, LaunchConfig]]
    fused: Mapping[Family, Mapping[int, LaunchConfig]]


LARGE = (90, 100)
"""Compute capabilities whose tables use 227 KiB of shared memory; all others 99."""
_FP32 = {16: LaunchConfig(32, 32, 16, 4, 2)}
# sm_90: 227 KiB of shared memory.
_LARGE = Table(
    alone={
        "dense": {
            16: LaunchConfig(64, 128, 16, 4, 4),
            32: LaunchConfig(128, 64, 32, 4, 4),
            64: LaunchConfig(128, 64, 64, 4, 3, smallest_t=16),
            128: LaunchConfig(128, 64, 128, 8, 3, smallest_t=32),
        },
        "packed": {
            16: LaunchConfig(64, 128, 16, 4, 3),
            32: LaunchConfig(128, 64, 32, 8, 4),
            64: LaunchConfig(128, 64, 64, 4, 3),
            128: LaunchConfig(128, 64, 128, 4, 3),
        },
        "w8a8": {
            16: LaunchConfig(128, 128, 16, 4, 4),
            32: LaunchConfig(128, 128, 32, 4, 4),
            64: LaunchConfig(128, 128, 64, 4, 3),
            128: LaunchConfig(128, 128, 128, 8, 3),
        },
        "fp32": _FP32,
    },
    fused={
        "dense": {
            16: LaunchConfig(64, 128, 16, 4, 3),
            32: LaunchConfig(64, 64, 32, 4, 4),
            64: LaunchConfig(64, 64, 64, 4, 3, smallest_t=16),
            128: LaunchConfig(128, 64, 128, 8, 4, smallest_t=32),
        },
        "packed": {
            16: LaunchConfig(64, 128, 16, 4, 3),
            32: LaunchConfig(64, 64, 32, 4, 4),
            64: LaunchConfig(64, 64, 64, 8, 3),
            128: LaunchConfig(64, 64, 128, 4, 3),
        },
        "w8a8": {
            16: LaunchConfig(64, 128, 16, 4, 4),
            32: LaunchConfig(64, 128, 32, 4, 4),
            64: LaunchConfig(64, 128, 64, 4, 4),
            128: LaunchConfig(128, 128, 128, 8, 3),
        },
        "fp32": _FP32,
    },
)
# sm_100 as well, where one more stage keeps a few words out of memory.
_SM_100 = Table(
    alone=_LARGE.alone,
    fused={**_LARGE.fused, "packed": {**_LARGE.fused["packed"], 16: LaunchConfig(64, 128, 16, 4, 4)}},
)
# sm_86, sm_89, sm_120: 99 KiB. sm_80 has more, but runs the same instructions.
_SMALL = Table(
    alone={
        "dense": {
            16: LaunchConfig(64, 64, 16, 4, 4),
            32: LaunchConfig(64, 64, 32, 4, 4),
            64: LaunchConfig(64, 64, 64, 4, 3),
            128: LaunchConfig(128, 32, 128, 8, 3),
        },
        "packed": {
            16: LaunchConfig(64, 64, 16, 4, 4),
            32: LaunchConfig(64, 64, 32, 4, 3),
            64: LaunchConfig(64, 64, 64, 8, 3),
            128: LaunchConfig(128, 32, 128, 8, 3),
        },
        "w8a8": {
            16: LaunchConfig(64, 128, 16, 4, 3),
            32: LaunchConfig(64, 128, 32, 4, 3),
            64: LaunchConfig(64, 128, 64, 8, 2),
            128: LaunchConfig(64, 128, 128, 8, 2),
        },
        "fp32": _FP32,
    },
    fused={
        "dense": {
            16: LaunchConfig(64, 64, 16, 4, 4),
            32: LaunchConfig(64, 64, 32, 4, 4),
            64: LaunchConfig(64, 64, 64, 4, 3),
            128: LaunchConfig(64, 32, 128, 8, 3),
        },
        "packed": {
            16: LaunchConfig(64, 64, 16, 4, 4),
            32: LaunchConfig(64, 64, 32, 4, 2),
            64: LaunchConfig(64, 64, 64, 8, 3),
            128: LaunchConfig(64, 64, 128, 8, 3),
        },
        "w8a8": {
            16: LaunchConfig(32, 128, 16, 4, 3),
            32: LaunchConfig(32, 128, 32, 4, 3),
            64: LaunchConfig(32, 128, 64, 8, 2),
            128: LaunchConfig(32, 128, 128, 8, 2),
        },
        "fp32": _FP32,
    },
)
SHORTEST_RUN = 16
"""Where fewer inputs certainly share a group (act-order as it lies on disk, odd group sizes), a scale and a zero point
are read for almost every weight; and 3-bit codes are read by bytes. Such tiles are small, and 8 warps hold them."""
MOST_ROWS = ((8, 16), (24, 32), (40, 64))
"""(rows an expert up to which, block_t); 128 above."""
MOST_ROWS_W8A8 = ((8, 16), (24, 32), (96, 64))
PINNED_BLOCK_T = 64
"""Of batch-invariant mode, whatever the number of rows."""


def config_for(
    fmt: WeightFormat,
    k: int,
    dtype: torch.dtype,
    arch: int,
    rows: int,
    experts: int,
    fused: bool = False,
    w8a8: bool = False,
) -> LaunchConfig:
    """The config of a projection.

    Args:
        fmt: of the weights.
        k: inputs.
        dtype: of the activations.
        arch: compute capability, e.g. 90; 0 in the interpreter.
        rows: R = T * top_k.
        experts: E.
        fused: an activation of gate and up follows in the same program.
        w8a8: activations are quantised to 8 bits.

    Returns:
        The config; its block_t is the tile of the work list, and that of both projections of a layer.
    """
    mean = rows / max(1, min(rows, experts))
    most_rows = MOST_ROWS_W8A8 if w8a8 else MOST_ROWS
    block_t = next((block_t for most, block_t in most_rows if mean <= most), 128)
    return _config(fmt, k, dtype, arch, block_t, fused, w8a8)


def pinned_config(
    fmt: WeightFormat, k: int, dtype: torch.dtype, arch: int, fused: bool = False, w8a8: bool = False
) -> LaunchConfig:
    """The config of batch-invariant mode: the same for any number of rows, and so are a row's bits.

    A row is one column of the matrix unit's product. Its sum runs over K in the config's steps and never meets
    another column, so neither the other rows nor the row's place in the tile are part of it.

    Arguments as for `config_for`.
    """
    return replace(_config(fmt, k, dtype, arch, PINNED_BLOCK_T, fused, w8a8), smallest_t=None)


def all_configs(
    fmt: WeightFormat, k: int, dtype: torch.dtype, arch: int, w8a8: bool = False
) -> Iterator[tuple[LaunchConfig, bool]]:
    """Every (config, fused) that `config_for` can return for a projection, over all numbers of rows."""
    for fused in (False, True):
        for config in {_config(fmt, k, dtype, arch, block_t, fused, w8a8): None for block_t in (16, 32, 64, 128)}:
            yield config, fused


def family_of(fmt: WeightFormat, dtype: torch.dtype, w8a8: bool = False) -> Family:
    """The rows of the table that a projection's config comes from."""
    if dtype == torch.float32:
        return "fp32"
    if w8a8:
        return "w8a8"
    dense = (fmt.kind, dtype) in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    return "dense" if dense else "packed"


def table_of(arch: int) -> Table:
    """The table of a compute capability."""
    return {90: _LARGE, 100: _SM_100}.get(arch, _SMALL)


def _config(
    fmt: WeightFormat, k: int, dtype: torch.dtype, arch: int, block_t: int, fused: bool, w8a8: bool
) -> LaunchConfig:
    table = table_of(arch)
    family = family_of(fmt, dtype, w8a8)
    block_t = 16 if family == "fp32" else block_t
    run = fmt.run(k)
    config = (table.fused if fused else table.alone)[family][block_t]
    if w8a8:
        return replace(config, block_k=min(config.block_k, run or config.block_k), scale_on_sum=run != 0)
    config = _with_scales(config, fmt, run)
    if family == "packed" and 0 < run < SHORTEST_RUN:
        block_k, stages = (16, 3 if table is _SMALL else 2) if fused else (32, 2)
        config = replace(config, block_n=64, block_k=block_k, num_warps=8, num_stages=stages, smallest_t=None)
    elif family == "packed" and fmt.bits == 3:
        few = block_t <= 64 and table is not _SMALL
        block_k, stages = (64, 3) if few else (32, 3 if table is _SM_100 else 2)
        config = replace(config, block_n=64, block_k=block_k, num_warps=8, num_stages=stages, smallest_t=None)
    elif table is _SM_100 and fmt.kind == "mxfp4" and block_t == 16:
        config = replace(config, num_stages=config.num_stages + 1)  # keeps a few words out of memory
    return config


def _with_scales(config: LaunchConfig, fmt: WeightFormat, run: int) -> LaunchConfig:
    """Where scales are applied: on the sum of a step for few rows, as far as a step of 64 or more lies in one group.

    That costs one operation an output instead of one a weight, and integer weights stay exact. For many rows it
    costs more. E2M1 codes with their scale are exact in bf16 and fp16, in groups too short for a step.
    """
    if fmt.dense or fmt.kind in ("nvfp4", "mxfp4") or config.block_t > 64 or 0 < run < 64:
        return config
    return replace(config, block_k=min(config.block_k, run or config.block_k), scale_on_sum=run != 0)
