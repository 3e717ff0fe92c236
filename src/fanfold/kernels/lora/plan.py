"""The order of the fold in Triton: each expert's rows by adapter slot, cut into tiles, with no size read back.

A program takes some of one expert's rows, `CHUNK` at a time. It counts the slots of all of the expert's rows, so it
knows where the rows of each slot start, and then places its own chunks.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (Triton's builtins carry no types.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.common.device import arch_of
from fanfold.kernels.lora.checks import check_plan
from fanfold.kernels.lora.device import wait_for_the_kernel_before
from fanfold.kernels.lora.sizes import work_items
from fanfold.spec.adapters import AdapterWork
from fanfold.spec.route import Route

CHUNK = (64, 1024)
"""Fewest and most rows that a program places at once."""


@triton.jit
def load_slots(sorted_ptr, adapter_ptr, position, inside, one_slot, top_k):
    """Row (token * top_k + slot) and adapter slot of sorted positions."""
    row = tl.load(sorted_ptr + position, mask=inside, other=0)
    if adapter_ptr is None:
        slot = tl.zeros_like(row) + one_slot
    else:
        slot = tl.load(adapter_ptr + row // top_k, mask=inside, other=-1)
    return row, slot


@triton.jit
def base_last(slot, slots):
    """Slots as bins: the base, and ids that are no slot's, go into bin `slots`."""
    return tl.where((slot >= 0) & (slot < slots), slot, slots)


@triton.jit
def store_items(
    items_ptr, expert, begin, end, totals, starts, slots, c, programs, TILE: tl.constexpr, BLOCK_S: tl.constexpr
):
    """The tiles of every slot (tile t by program t % programs); program 0 empties the items that are left."""
    base = (begin // TILE + tl.minimum(begin, expert * (slots + 1))).to(tl.int64)
    after = (end // TILE + tl.minimum(end, (expert + 1) * (slots + 1))).to(tl.int64)
    bin_ = tl.arange(0, BLOCK_S)
    tiles = (totals + TILE - 1) // TILE
    places = tl.cumsum(tiles, 0) - tiles
    slot = tl.where(bin_ < slots, bin_, -1)
    for t in range(c, tl.max(tiles, 0), programs):
        at = items_ptr + (base + places + t) * 4
        mask = t < tiles
        tl.store(at, tl.zeros_like(slot) + expert, mask=mask)
        tl.store(at + 1, slot, mask=mask)
        tl.store(at + 2, begin + starts + t * TILE, mask=mask)
        tl.store(at + 3, tl.minimum(totals - t * TILE, TILE), mask=mask)
    if c == 0:
        empty_items(items_ptr, base + tl.sum(tiles, 0), after)


@triton.jit
def empty_items(items_ptr, first, after):
    """Marks items first .. after as without work."""
    for start in range(first, after, 128):
        item = start + tl.arange(0, 128)
        for field in tl.static_range(4):
            tl.store(items_ptr + item * 4 + field, tl.full((128,), -1 if field < 2 else 0, tl.int32), mask=item < after)


@triton.jit(do_not_specialize=["one_slot", "R", "E", "total_items", "slots", "top_k", "programs"])
def order_kernel(
    offsets_ptr: tl.tensor,
    sorted_ptr: tl.tensor,
    adapter_ptr: tl.tensor,
    items_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    unknown_ptr: tl.tensor,
    one_slot: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    total_items: tl.tensor,
    slots: tl.tensor,
    top_k: tl.tensor,
    programs: tl.tensor,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (e, c) places chunks c, c + programs, ... of expert e; program (E, 0) ends the list."""
    e = tl.program_id(0)
    c = tl.program_id(1)
    begin = tl.load(offsets_ptr + e)
    end = R
    if e < E:
        end = tl.load(offsets_ptr + e + 1)
    elif c == 0:
        first = begin // TILE + tl.minimum(begin, E * (slots + 1))
        empty_items(items_ptr, first.to(tl.int64), total_items.to(tl.int64))
    index = tl.arange(0, CHUNK)

    totals = tl.zeros((BLOCK_S,), tl.int32)
    for first in range(begin, end, CHUNK):
        inside = first + index < end
        _, slot = load_slots(sorted_ptr, adapter_ptr, first + index, inside, one_slot, top_k)
        totals += tl.histogram(base_last(slot, slots), BLOCK_S, mask=inside)
    starts = tl.cumsum(totals, 0) - totals
    if e < E:
        store_items(items_ptr, e, begin, end, totals, starts, slots, c, programs, TILE, BLOCK_S)

    for first in range(begin, end, CHUNK):
        inside = first + index < end
        row, slot = load_slots(sorted_ptr, adapter_ptr, first + index, inside, one_slot, top_k)
        bins = tl.where(inside, base_last(slot, slots), slots + 1)
        counts = tl.histogram(bins, BLOCK_S, mask=inside)
        if ((first - begin) // CHUNK) % programs == c:
            if unknown_ptr is not None:  # a token is counted once, at its first row
                unknown = tl.sum((inside & (slot >= slots) & (row % top_k == 0)).to(tl.int32), 0)
                tl.atomic_add(unknown_ptr, unknown, mask=unknown > 0)
            if e < E:
                # A sorted chunk lies in runs of one slot, and a run moves as a whole.
                keys = tl.sort(bins * CHUNK + index)
                moves = starts - (tl.cumsum(counts, 0) - counts)
                place = begin + index + tl.gather(moves, tl.minimum(keys // CHUNK, BLOCK_S - 1), 0)
                position = first + keys % CHUNK
                known = position < end
                tl.store(positions_ptr + place, position, mask=known)
                tl.store(rows_ptr + place, tl.load(sorted_ptr + position, mask=known, other=0), mask=known)
        starts += counts
    wait_for_the_kernel_before(CHAINED)


def order_rows(
    route: Route,
    adapter_ids: Tensor | None,
    slots: int,
    tile: int,
    *,
    one_slot: int = -1,
    unknown: Tensor | None = None,
    work: AdapterWork | None = None,
) -> AdapterWork:
    """Orders a batch's rows by (expert, adapter slot), once for gate_up and down of a layer. One launch.

    Args:
        route: the plan of the batch.
        adapter_ids: int32 [T], adapter slot of each token; < 0 and >= `slots` are the base. None: `one_slot` for all.
        slots: adapter slots of the layer's tables.
        tile: rows of a tile, of `sizes.row_tile`.
        one_slot: the slot of every token where there are no ids; -1 is the base.
        unknown: int32 [1] or None; grows by the number of tokens whose id is >= `slots`.
        work: of `empty_work`, made before the kernel that was launched last. Then programs run beside the end of that
            kernel: it must not write what they read. None: behind it.

    Returns:
        The work of the fold.

    Raises:
        ArgumentError: an argument does not go with the others.
        UnavailableError: the tensors are where no kernel runs.
    """
    rows, experts = route.sorted_rows.numel(), route.num_experts
    check_plan(route, adapter_ids, slots, tile, one_slot, unknown)
    device = route.sorted_rows.device
    arch_of(device)
    chained = work is not None
    work = work or empty_work(route, slots, tile)
    if rows == 0:
        return work
    arguments = order_arguments(route, adapter_ids, work, one_slot, unknown, chained)
    with torch.cuda.device_of(work.items):
        order_kernel[(experts + 1, arguments["programs"])](**arguments)
    return work


def empty_work(route: Route, slots: int, tile: int) -> AdapterWork:
    """Memory for the work of a plan's rows; arguments as for `order_rows`."""
    rows, device = route.sorted_rows.numel(), route.sorted_rows.device
    items = torch.empty((work_items(rows, route.num_experts, slots, tile), 4), dtype=torch.int32, device=device)
    positions, placed = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    return AdapterWork(items, positions, placed, route.top_k, slots, tile)


def order_arguments(
    route: Route,
    adapter_ids: Tensor | None,
    work: AdapterWork,
    one_slot: int,
    unknown: Tensor | None,
    chained: bool,
) -> dict[str, Any]:
    """Arguments and launch options of `order_kernel`, by name; what is compiled depends on nothing else."""
    rows, experts = route.sorted_rows.numel(), route.num_experts
    usual = 2 * -(-rows // max(1, min(rows, experts)))  # most experts have fewer rows
    chunk = min(max(triton.next_power_of_2(usual), CHUNK[0]), CHUNK[1])
    arguments: dict[str, Any] = dict(
        offsets_ptr=route.expert_offsets,
        sorted_ptr=route.sorted_rows,
        adapter_ptr=adapter_ids,
        items_ptr=work.items,
        positions_ptr=work.positions,
        rows_ptr=work.rows,
        unknown_ptr=unknown,
        one_slot=one_slot,
        R=rows,
        E=experts,
        total_items=work.items.shape[0],
        slots=work.slots,
        top_k=route.top_k,
        programs=-(-usual // chunk),
        TILE=work.tile,
        CHUNK=chunk,
        BLOCK_S=max(32, triton.next_power_of_2(work.slots + 2)),
        CHAINED=chained,
        num_warps=max(1, chunk // 128),  # no more threads than rows, so that the histogram sees each once
    )
    return {**arguments, "launch_pdl": True} if chained else arguments
