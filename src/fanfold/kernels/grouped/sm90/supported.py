"""Which projections the Hopper product runs, by format and size."""

from __future__ import annotations

import torch

from fanfold.spec.weight_format import WeightFormat

TILE = 64
"""Rows and columns of a tile of weights (`fragments`)."""
INTEGERS = ("gptq", "awq", "packed")
FP4_GROUPS = {"nvfp4": 16, "mxfp4": 32}
GROUPS = (32, 64, 128)
"""Group sizes of integers that the product has been run with."""


def refusal(fmt: WeightFormat, halves: int, n: int, k: int, dtype: torch.dtype) -> str | None:
    """Why the product does not run W [halves * n, k]; None where it does.

    Args:
        fmt: of the weights.
        halves: 2 for gate and up.
        n: outputs of a half.
        k: inputs.
        dtype: of the activations.
    """
    integer = fmt.kind in INTEGERS and fmt.bits == 4
    if not integer and fmt.kind not in FP4_GROUPS:
        return f"{fmt}: runs 4-bit gptq, awq and packed, nvfp4 and mxfp4"
    if integer and fmt.group_size not in GROUPS:
        return f"group_size {fmt.group_size}: runs {', '.join(map(str, GROUPS))}"
    if dtype not in ((torch.bfloat16, torch.float16) if integer else (torch.bfloat16,)):
        kinds = "bfloat16 and float16" if integer else "bfloat16"
        return f"{str(dtype).removeprefix('torch.')} activations: runs {kinds} with {fmt.kind}"
    group = fmt.group_size if integer else TILE
    if n * halves % TILE or n % 8 or k % max(TILE, group):
        return f"{halves} x {n} rows, K = {k}: runs multiples of {TILE}, K also of the group"
    return None
