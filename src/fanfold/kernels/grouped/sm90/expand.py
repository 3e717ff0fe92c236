"""What the Hopper product is given of a batch's adapters: checks, and arguments of the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.spec.adapters import Aside, Expand, xa_columns
from fanfold.spec.work import WorkItems

POINTERS = ("y1_ptr", "xa_ptr", "table_a_ptr", "table_b_ptr", "table_scale_ptr", "table_rank_ptr", "ids_ptr")
SIZES = ("adapter_slots", "stride_xa", "stride_half", "table_experts", "adapter_top_k")
"""Arguments of the kernel that are about adapters, in its order."""


def check_expand(
    op: str, expand: Expand | None, x: Tensor, work: WorkItems, weights: FragmentWeights, config: Sm90Config
) -> None:
    """Whether an `Expand` goes with a product of these rows: shapes and dtypes alone.

    Raises:
        ArgumentError: it does not.
    """
    if expand is None:
        return
    if not work.single:
        raise ArgumentError(
            f"{op}: expand",
            found=f"work items of up to {work.tile} rows",
            expected="single rows",
            next_step="Fold behind the launch, with fanfold.kernels.lora.launch.",
        )
    table, device = expand.table, x.device
    rows = work.total
    wanted = (
        ("xa", expand.xa, x.dtype, [weights.halves, rows, xa_columns(table.max_rank)]),
        ("adapter_ids", expand.adapter_ids, torch.int32, [rows // expand.top_k]),
    )
    for name, tensor, dtype, shape in wanted:
        right = tensor.dtype == dtype and list(tensor.shape) == shape and tensor.is_contiguous()
        if not right or tensor.device != device:
            raise ArgumentError(
                f"{op}: expand.{name}",
                found=f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
                expected=f"contiguous {dtype} {shape} on {device}",
                next_step="Make it for the rows of this call.",
            )
    if (table.projections, table.n, table.dtype) != (weights.halves, weights.n, x.dtype):
        raise ArgumentError(
            f"{op}: expand.table",
            found=f"{table.projections} projections of {table.n} outputs in {table.dtype}",
            expected=f"{weights.halves} of {weights.n} in {x.dtype}",
            next_step="Pass the table of this projection.",
        )
    if config.parts > 1:
        raise ArgumentError(
            f"{op}: expand",
            found=f"K in {config.parts} parts",
            expected="one part: a change goes onto the rounded sum",
            next_step="Fold behind the launch, with fanfold.kernels.lora.launch.fold_down.",
        )


def adapter_values(
    aside: Aside | None, expand: Expand | None, nothing: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
    """Values of POINTERS and of SIZES; `nothing` is a pointer that is not read."""
    if aside is not None:
        return (aside.y1, *(nothing,) * 5, aside.adapter_ids), (aside.slots, 0, 0, 0, 0)
    if expand is not None:
        table, xa = expand.table, expand.xa
        sizes = table.slots, xa.stride(1), xa.stride(0), table.a.shape[2], expand.top_k
        return (nothing, xa, table.a, table.b, table.scale, table.rank, expand.adapter_ids), sizes
    return (nothing,) * len(POINTERS), (0,) * len(SIZES)
