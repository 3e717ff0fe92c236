"""Device functions of the plan; `plan` says what they do together."""
# pyright: basic, reportCallIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl


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
