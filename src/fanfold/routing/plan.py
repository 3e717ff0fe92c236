"""The plan of a batch in Triton: rows in expert order, offsets and a work list, with no size read back.

Two forms with equal results. With few rows one launch does it: program e reads all ids, counts those below e and writes
its own rows behind them. That is E * R comparisons, and one program's walk over R ids is serial; so many rows are cut
into chunks, counted in a first launch, and placed in a second one that sums the counts of all chunks.

The work list comes as slots of four numbers (`WorkList`), or in words with the rows beside them (`WorkItems`).
"""
# pyright: basic, reportCallIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.routing.sizes import power_of_two, work_slots
from fanfold.spec.route import Route
from fanfold.spec.work import WorkItems, WorkList

# Where one launch is taken: at most 4 steps of 4096 ids twice over, and at most 32 MB of ids read by all programs
# together, a few microseconds each. By count of bytes and steps, not by measurement.
ONE_LAUNCH_ROWS = 16384
ONE_LAUNCH_READS = 2**22

MOST_EXPERTS = 2**15
MOST_TILE = 2**16 - 1
"""What a word of work has room for."""
COUNT_BLOCK = 256  # ids that a program of the first launch counts at once; more spill with 4096 experts
COUNTS_IN_REGISTERS = 8192  # counts that a program of the second launch loads at once


@triton.jit
def _load_experts(ids_ptr: tl.tensor, row: tl.tensor, R: tl.tensor, E: tl.tensor) -> tl.tensor:
    """Expert of each row as int32; E where the id is no expert's (compared before an int64 id is narrowed)."""
    ids = tl.load(ids_ptr + row, mask=row < R, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)


@triton.jit
def _store_slots(
    work_ptr: tl.tensor,
    slot: tl.tensor,
    expert: tl.tensor,
    start: tl.tensor,
    rows: tl.tensor,
    inside: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Work slots with (rows > 0) and without work."""
    if WORDS:
        word = (tl.full(rows.shape, expert, tl.int64) << 48) | (rows.to(tl.int64) << 32) | start.to(tl.int64)
        tl.store(work_ptr + slot, tl.where(rows > 0, word, -1), mask=inside)
    else:
        at = work_ptr + slot.to(tl.int64) * 4
        tl.store(at, tl.where(rows > 0, expert, -1), mask=inside)
        tl.store(at + 1, tl.where(rows > 0, start, 0), mask=inside)
        tl.store(at + 2, rows, mask=inside)
        tl.store(at + 3, tl.zeros_like(rows), mask=inside)


@triton.jit
def _store_expert(
    offsets_ptr: tl.tensor,
    work_ptr: tl.tensor,
    e: tl.tensor,
    offset: tl.tensor,
    count: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Offset and work slots of expert e; e = E stores the end of the offsets and empties what is left of the list."""
    tl.store(offsets_ptr + e, offset)
    base = offset // TILE + e
    end = tl.where(e == E, R // TILE + E, (offset + count) // TILE + e + 1)
    count = tl.where(e == E, 0, count)
    for first in range(base, end, 128):
        slot = first + tl.arange(0, 128)
        start = (slot - base) * TILE
        rows = tl.maximum(tl.minimum(count - start, TILE), 0)
        _store_slots(work_ptr, slot, e, offset + start, rows, slot < end, WORDS)


@triton.jit
def _store_rows(
    sorted_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    row: tl.tensor,
    position: tl.tensor,
    expert: tl.tensor,
    offset: tl.tensor,
    hit: tl.tensor,
    E: tl.tensor,
    TILE: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Rows at their sorted positions, and beside the words of their expert, whose rows start at `offset`."""
    tl.store(sorted_ptr + position, row, mask=hit)
    tl.store(positions_ptr + row, position, mask=hit)
    if WORDS:
        first = (offset // TILE + expert).to(tl.int64) * TILE
        tl.store(rows_ptr + first + (position - offset), row, mask=hit & (expert < E))


@triton.jit
def plan_kernel(
    ids_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    sorted_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    work_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program e of E + 1 plans expert e; program E takes the rows whose id is no expert's."""
    e = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), tl.int32)
    mine = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, R, BLOCK):
        row = first + index
        experts = _load_experts(ids_ptr, row, R, E)
        below += ((experts < e) & (row < R)).to(tl.int32)
        mine += ((experts == e) & (row < R)).to(tl.int32)
    offset = tl.sum(below)
    _store_expert(offsets_ptr, work_ptr, e, offset, tl.sum(mine), R, E, TILE, WORDS)

    placed = offset
    for first in range(0, R, BLOCK):
        row = first + index
        hit = (_load_experts(ids_ptr, row, R, E) == e) & (row < R)
        position = placed + tl.cumsum(hit.to(tl.int32), 0) - 1
        _store_rows(sorted_ptr, positions_ptr, rows_ptr, row, position, e, offset, hit, E, TILE, WORDS)
        placed += tl.sum(hit.to(tl.int32))


@triton.jit
def count_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> None:
    """Program c counts the rows of each expert in chunk c, BLOCK at a time: counts [chunks, E]."""
    c = tl.program_id(0)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, CHUNK, BLOCK):
        experts = _load_experts(ids_ptr, c * CHUNK + first + tl.arange(0, BLOCK), R, E)
        counts += tl.histogram(experts, BLOCK_E, mask=experts < E)
    e = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + c.to(tl.int64) * E + e, counts, mask=e < E)


@triton.jit
def place_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    sorted_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    work_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    chunks: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program c places the rows of chunk c, and stores the offsets and work slots of experts c, c + chunks, ..."""
    c = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_C, BLOCK_E), tl.int32)
    before = tl.zeros((BLOCK_C, BLOCK_E), tl.int32)
    for first in range(0, chunks, BLOCK_C):
        chunk = (first + tl.arange(0, BLOCK_C))[:, None]
        at = counts_ptr + chunk.to(tl.int64) * E + e[None, :]
        counts = tl.load(at, mask=(chunk < chunks) & (e[None, :] < E), other=0)
        total += counts
        before += tl.where(chunk < c, counts, 0)
    totals = tl.sum(total, axis=0)
    befores = tl.sum(before, axis=0)
    starts = tl.cumsum(totals, 0) - totals
    for expert in range(c, E + 1, chunks):
        offset = tl.sum(tl.where(e < expert, totals, 0))
        count = tl.sum(tl.where(e == expert, totals, 0))
        _store_expert(offsets_ptr, work_ptr, expert, offset, count, R, E, TILE, WORDS)

    # A sorted chunk lies in runs of one expert; a run moves as a whole, and rows of no expert are the last run.
    own = tl.load(counts_ptr + c.to(tl.int64) * E + e, mask=e < E, other=0)
    move = starts + befores - (tl.cumsum(own, 0) - own)
    move_last = tl.sum(totals) + c * CHUNK - tl.sum(befores) - tl.sum(own)
    index = tl.arange(0, CHUNK)
    keys = tl.sort(_load_experts(ids_ptr, c * CHUNK + index, R, E) * CHUNK + index)
    experts = keys // CHUNK
    row = c * CHUNK + keys % CHUNK
    bins = tl.minimum(experts, BLOCK_E - 1)
    position = index + tl.where(experts < E, tl.gather(move, bins, 0), move_last)
    offset = tl.gather(starts, bins, 0)
    _store_rows(sorted_ptr, positions_ptr, rows_ptr, row, position, experts, offset, row < R, E, TILE, WORDS)


def plan_sort(topk_ids: Tensor, num_experts: int, tile: int) -> tuple[Route, WorkList]:
    """Rows in expert order and their tiles: `routing.reference.plan_sort` and `work_list` on the GPU, bit for bit.

    Args:
        topk_ids: int32 or int64 [T, k]; ids outside [0, E) are experts of another rank, and their rows come last.
        num_experts: E.
        tile: rows of a tile of the work list.

    Returns:
        The Route of R = T*k rows, and the work list.
    """
    slots = work_slots(topk_ids.numel(), num_experts, tile)
    work = torch.empty((slots, 4), dtype=torch.int32, device=topk_ids.device)
    return _plan(topk_ids, num_experts, tile, work, None), WorkList(work, tile)


def plan_items(topk_ids: Tensor, num_experts: int, tile: int) -> tuple[Route, WorkItems]:
    """As `plan_sort`, with the work list in words: `routing.reference.plan_sort` and `work_items`, bit for bit.

    Raises:
        ArgumentError: more experts or a larger tile than the words have room for.
    """
    rows = topk_ids.numel()
    if num_experts > MOST_EXPERTS or tile > MOST_TILE:
        raise ArgumentError(
            "plan_items",
            found=f"{num_experts} experts, tiles of {tile} rows",
            expected=f"at most {MOST_EXPERTS} experts and {MOST_TILE} rows",
            next_step="Use plan_sort, whose work list has no such bounds.",
        )
    slots = work_slots(rows, num_experts, tile)
    words = torch.empty(slots, dtype=torch.int64, device=topk_ids.device)
    beside = torch.empty((slots, tile), dtype=torch.int32, device=topk_ids.device)
    route = _plan(topk_ids, num_experts, tile, words, beside)
    return route, WorkItems(words, beside, rows, tile, False, num_experts)


def _plan(topk_ids: Tensor, num_experts: int, tile: int, work: Tensor, beside: Tensor | None) -> Route:
    """The Route; fills the work list: words where there are rows to go beside them, else slots."""
    rows = topk_ids.numel()
    ids = topk_ids.contiguous()
    offsets, sorted_rows, positions = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (num_experts + 1, rows, rows)
    )
    words = beside is not None
    if takes_one_launch(rows, num_experts):
        block = plan_block(rows)
        plan_kernel[(num_experts + 1,)](
            ids,
            offsets,
            sorted_rows,
            positions,
            work,
            beside,
            rows,
            num_experts,
            TILE=tile,
            BLOCK=block,
            WORDS=words,
            num_warps=plan_warps(block),
        )
    else:
        chunk = plan_chunk(rows)
        chunks = -(-rows // chunk)
        block_e = max(32, power_of_two(num_experts))
        counts = torch.empty((chunks, num_experts), dtype=torch.int32, device=ids.device)
        count_kernel[(chunks,)](
            ids, counts, rows, num_experts, CHUNK=chunk, BLOCK=COUNT_BLOCK, BLOCK_E=block_e, num_warps=8
        )
        place_kernel[(chunks,)](
            ids,
            counts,
            offsets,
            sorted_rows,
            positions,
            work,
            beside,
            chunks,
            rows,
            num_experts,
            TILE=tile,
            CHUNK=chunk,
            BLOCK_E=block_e,
            BLOCK_C=place_block(block_e),
            WORDS=words,
            num_warps=8,
        )
    return Route(offsets, sorted_rows, positions, topk_ids.shape[1])


def takes_one_launch(rows: int, experts: int) -> bool:
    """Whether the form with one program an expert plans R rows."""
    return rows <= ONE_LAUNCH_ROWS and rows * experts <= ONE_LAUNCH_READS


def plan_block(rows: int) -> int:
    """Ids a program of the one launch reads at a time."""
    return min(4096, max(128, power_of_two(rows)))


def plan_warps(block: int) -> int:
    """Warps of the one launch: at most 8 ids a thread."""
    return 4 if block <= 1024 else 16


def plan_chunk(rows: int) -> int:
    """Rows of a chunk: about 128 chunks, one an SM, but not more than a program sorts in registers."""
    return min(2048, max(256, power_of_two(-(-rows // 128))))


def place_block(block_e: int) -> int:
    """Chunks whose counts a program of the second launch reads at a time."""
    return max(1, min(64, COUNTS_IN_REGISTERS // block_e))
