"""The LoRA fold and its order of rows in readable torch: the oracles of the LoRA kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.common.invariant import invariant_matmul
from fanfold.kernels.lora.sizes import first_item, work_items
from fanfold.spec import LoraPair, Route
from fanfold.spec.adapters import AdapterWork


def lora_fold(
    y: Tensor,
    x: Tensor,
    pairs: Mapping[tuple[int, int], LoraPair],
    slots: Tensor,
    experts: Tensor,
    *,
    x_rows: Tensor | None = None,
) -> None:
    """Adds each row's low-rank change onto its base product, in place.

    xa = act(x A^T); delta = act(xa B^T); y = act(fp32(y) + scale * fp32(delta)); fp32 sums, an fp32 scale,
    act(.) rounds to y's dtype: three roundings. A row's bits do not depend on the other rows.

    Args:
        y: [R, N], the base product in the activations' dtype, or a view of some columns; changed in place.
        x: [R, K] in y's dtype, or [T, K] with `x_rows`.
        pairs: (adapter slot, expert) -> A [r, K], B [N, r], scale.
        slots: integers [R], the adapter slot of each row; < 0 = base.
        experts: integers [R], the expert of each row.
        x_rows: integers [R], the row of x that belongs to each row of y; None = the same row.

    Rows without a pair (base, a slot or an expert that has none) are not touched, bit for bit.

    Raises:
        ArgumentError: shapes or dtypes that do not go together.
    """
    rows = slots.shape[0]
    _check("y", y, [rows, y.shape[-1]], y.dtype)
    _check("x", x, [rows if x_rows is None else x.shape[0], x.shape[-1]], y.dtype)
    _check("experts", experts, [rows], experts.dtype)
    if x_rows is not None:
        _check("x_rows", x_rows, [rows], x_rows.dtype)

    rows_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    places = zip(_integers(slots), _integers(experts), strict=True)
    for row, place in enumerate(places):
        if place in pairs:
            rows_of[place].append(row)

    for place, its_rows in rows_of.items():
        pair = pairs[place]
        _check(f"A of {place}", pair.a, [pair.rank, x.shape[1]], pair.a.dtype)
        _check(f"B of {place}", pair.b, [y.shape[1], pair.rank], pair.b.dtype)
        at = torch.tensor(its_rows, device=y.device)
        source = x[at if x_rows is None else x_rows[at].long()]
        xa = invariant_matmul(source.float(), pair.a.float()).to(y.dtype)
        delta = invariant_matmul(xa.float(), pair.b.float()).to(y.dtype)
        scale = torch.tensor(pair.scale, dtype=torch.float32, device=y.device)
        y[at] = (y[at].float() + scale * delta.float()).to(y.dtype)


def order_rows(route: Route, adapter_ids: Tensor | None, slots: int, tile: int, *, one_slot: int = -1) -> AdapterWork:
    """A batch's rows ordered by (expert, adapter slot), and their tiles.

    Args:
        route: the plan of the batch.
        adapter_ids: integers [T], adapter slot of each token; < 0 and >= `slots` are the base. None: `one_slot`.
        slots: adapter slots of the layer's tables.
        tile: rows of a tile.
        one_slot: the slot of every token where there are no ids; -1 is the base.

    Returns:
        The work; the tiles of an expert start at item `sizes.first_item` of its offset.
    """
    rows, experts = route.sorted_rows.numel(), route.num_experts
    of_token = [one_slot] * (rows // route.top_k) if adapter_ids is None else _integers(adapter_ids)
    row_at, offsets = _integers(route.sorted_rows), _integers(route.expert_offsets)
    positions = list(range(rows))
    items = [[-1, -1, 0, 0] for _ in range(work_items(rows, experts, slots, tile))]
    for expert in range(experts):
        by_slot: dict[int, list[int]] = {slot: [] for slot in (*range(slots), -1)}
        for position in range(offsets[expert], offsets[expert + 1]):
            slot = of_token[row_at[position] // route.top_k]
            by_slot[slot if 0 <= slot < slots else -1].append(position)
        place, item = offsets[expert], first_item(offsets[expert], expert, slots, tile)
        for slot, its_positions in by_slot.items():
            positions[place : place + len(its_positions)] = its_positions
            for first in range(0, len(its_positions), tile):
                items[item] = [expert, slot, place + first, min(tile, len(its_positions) - first)]
                item += 1
            place += len(its_positions)
    device = route.sorted_rows.device
    as_tensor = torch.tensor(positions, dtype=torch.int32, device=device)
    list_of_items = torch.tensor(items, dtype=torch.int32, device=device).view(-1, 4)
    placed = route.sorted_rows[as_tensor.long()]
    return AdapterWork(list_of_items, as_tensor, placed, route.top_k, slots, tile)


def _integers(tensor: Tensor) -> list[int]:
    return cast("list[int]", tensor.tolist())


def _check(name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if list(tensor.shape) != shape or tensor.dtype != dtype:
        raise ArgumentError(
            f"lora_fold: {name}",
            found=f"{tensor.dtype} {list(tensor.shape)}",
            expected=f"{dtype} {shape}",
            next_step="Pass y [R, N], x [R, K] or [T, K] with x_rows [R], slots [R], experts [R].",
        )
