"""Which config a grouped product runs with: one small table a kind of machine.

Chosen by compiled resources (registers, shared memory, no spills) and by count of bytes and steps; not yet tuned by
measurement. Any config of a format gives right results; they differ in speed and in the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch

from fanfold.kernels.common.layouts import run_of
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weight_format import WeightFormat

Family = Literal["dense", "packed", "fp32"]
# block_t -> config. "packed": weights are unpacked in registers; "dense": they enter the product as they are;
# "fp32": fp32 activations, without matrix units.
Table = Mapping[Family, Mapping[int, LaunchConfig]]

_FP32 = {16: LaunchConfig(32, 32, 16, 4, 2)}
# sm_90, sm_100: 227 KiB of shared memory.
_LARGE: Table = {
    "dense": {
        16: LaunchConfig(64, 128, 16, 4, 4),
        32: LaunchConfig(64, 128, 32, 4, 4),
        64: LaunchConfig(128, 64, 64, 4, 4),
        128: LaunchConfig(128, 64, 128, 8, 4),
    },
    "packed": {
        16: LaunchConfig(64, 128, 16, 4, 4),
        32: LaunchConfig(64, 128, 32, 4, 4),
        64: LaunchConfig(128, 64, 64, 8, 4),
        128: LaunchConfig(128, 64, 128, 8, 3),
    },
    "fp32": _FP32,
}
# sm_86, sm_89, sm_120: 99 KiB. sm_80 has more, but runs the same instructions.
_SMALL: Table = {
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
    "fp32": _FP32,
}
FUSED = 64
"""Most outputs of a program that makes gate and up, and most inputs of its step where scales are on the weights: it
holds two tiles and two sums in registers."""
SHORTEST_RUN = 16
"""Where fewer inputs certainly share a group (act-order, odd group sizes), a scale and a zero point are read for almost
every weight; and 3-bit codes are read by bytes. Such tiles are small, and 8 warps hold them."""
MOST_ROWS = ((8, 16), (24, 32), (64, 64))
"""(rows an expert up to which, block_t); 128 above. Twice the mean, so that most experts fit in one tile."""
PINNED_BLOCK_T = 64
"""Of batch-invariant mode, whatever the number of rows."""


def config_for(
    fmt: WeightFormat, k: int, dtype: torch.dtype, arch: int, rows: int, experts: int, fused: bool = False
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

    Returns:
        The config; its block_t is the tile of the work list.
    """
    mean = rows / max(1, min(rows, experts))
    block_t = next((block_t for most, block_t in MOST_ROWS if mean <= most), 128)
    return _config(fmt, k, dtype, arch, block_t, fused)


def pinned_config(fmt: WeightFormat, k: int, dtype: torch.dtype, arch: int, fused: bool = False) -> LaunchConfig:
    """The config of batch-invariant mode: the same for any number of rows, and so are a row's bits.

    A row is one column of the matrix unit's product. Its sum runs over K in the config's steps and never meets
    another column, so neither the other rows nor the row's place in the tile are part of it.

    Arguments as for `config_for`.
    """
    return _config(fmt, k, dtype, arch, PINNED_BLOCK_T, fused)


def all_configs(fmt: WeightFormat, k: int, dtype: torch.dtype, arch: int) -> Iterator[tuple[LaunchConfig, bool]]:
    """Every (config, fused) that the functions above can return for a projection, over all numbers of rows."""
    for fused in (False, True):
        for config in {_config(fmt, k, dtype, arch, block_t, fused): None for block_t in (16, 32, 64, 128)}:
            yield config, fused


def _config(fmt: WeightFormat, k: int, dtype: torch.dtype, arch: int, block_t: int, fused: bool) -> LaunchConfig:
    table = _LARGE if arch in (90, 100) else _SMALL
    family: Family = "packed"
    if dtype == torch.float32:
        family, block_t = "fp32", 16
    elif (fmt.kind, dtype) in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        family = "dense"
    config = _with_scales(table[family][block_t], fmt, k)
    if fused:
        # A step whose sum is scaled stays as it is, so that fused and unfused give the same bits.
        block_k = config.block_k if config.scale_on_sum or family == "dense" else min(config.block_k, FUSED)
        config = replace(config, block_n=min(config.block_n, FUSED), block_k=block_k)
    if family == "packed" and 0 < run_of(fmt, k) < SHORTEST_RUN:
        config = replace(config, block_n=64, block_k=16 if fused else 32, num_warps=8, num_stages=2)
    elif family == "packed" and fmt.bits == 3:
        config = replace(config, block_n=64, block_k=32, num_warps=8, num_stages=2)
    return config


def _with_scales(config: LaunchConfig, fmt: WeightFormat, k: int) -> LaunchConfig:
    """Where scales are applied: on the sum of a step for few rows, as far as a step of 64 or more lies in one group.

    That costs one operation an output instead of one a weight, and integer weights stay exact. For many rows it
    costs more. E2M1 codes with their scale are exact in bf16 and fp16, in groups too short for a step.
    """
    run = run_of(fmt, k)
    if fmt.dense or fmt.kind in ("nvfp4", "mxfp4") or config.block_t > 64 or 0 < run < 64:
        return config
    return replace(config, block_k=min(config.block_k, run or config.block_k), scale_on_sum=run != 0)
