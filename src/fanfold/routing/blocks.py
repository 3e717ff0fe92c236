"""The block-aligned plan in Triton: one program a block, no size read back."""
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
# (Triton's builtins carry no types.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.routing.plan import plan_sort
from fanfold.routing.sizes import block_count, power_of_two
from fanfold.spec.work import Blocks

FEW_ROWS = 1024  # up to here each program counts all rows itself, in one launch


@triton.jit
def _find_block(counts: tl.tensor, j: tl.tensor, E: tl.tensor, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr) -> Any:
    """Of block j: expert (E past the last), its rows, its offset, first of its rows here; and the blocks in use."""
    e = tl.arange(0, BLOCK_E)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum(((ends <= j) & (e < E)).to(tl.int32))
    count = tl.sum(tl.where(e == expert, counts, 0))
    offset = tl.sum(tl.where(e < expert, counts, 0))
    first = (j - tl.sum(tl.where(e < expert, blocks, 0))) * BLOCK_M
    return expert, count, offset, first, tl.sum(blocks)


@triton.jit
def _store_block(
    experts_ptr: tl.tensor,
    total_ptr: tl.tensor,
    j: tl.tensor,
    expert: tl.tensor,
    used: tl.tensor,
    limit: tl.tensor,
    E: tl.tensor,
    BLOCK_M: tl.constexpr,
) -> None:
    """Expert of block j; the padded total, once."""
    tl.store(experts_ptr + j, tl.where(expert < E, expert, -1), mask=j < limit)
    tl.store(total_ptr, used * BLOCK_M, mask=j == 0)


@triton.jit
def few_blocks_kernel(
    ids_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    total_ptr: tl.tensor,
    limit: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """Program j counts the rows of all experts and gathers those of block j."""
    j = tl.program_id(0)
    row = tl.arange(0, BLOCK_R)
    ids = tl.load(ids_ptr + row, mask=row < R, other=-1)
    experts = tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)  # compared before an int64 id is narrowed
    counts = tl.histogram(experts, BLOCK_E, mask=experts < E)
    expert, count, offset, first, used = _find_block(counts, j, E, BLOCK_E, BLOCK_M)
    _store_block(experts_ptr, total_ptr, j, expert, used, limit, E, BLOCK_M)

    mine = (experts == expert) & (expert < E)
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    entry = row
    if PACKED:
        entry = offset + rank
    inside = mine & (rank >= first) & (rank < first + BLOCK_M)
    block_ptr = entries_ptr + j.to(tl.int64) * BLOCK_M
    tl.store(block_ptr + rank - first, entry, mask=inside)
    place = tl.arange(0, BLOCK_M)
    padding = ((first + place >= count) | (expert == E)) & (j < limit)
    tl.store(block_ptr + place, tl.zeros_like(place) + R, mask=padding)


@triton.jit
def blocks_kernel(
    offsets_ptr: tl.tensor,
    sorted_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    total_ptr: tl.tensor,
    limit: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """Program j copies the sorted rows of block j."""
    j = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    expert, count, offset, first, used = _find_block(end - start, j, E, BLOCK_E, BLOCK_M)
    _store_block(experts_ptr, total_ptr, j, expert, used, limit, E, BLOCK_M)

    place = tl.arange(0, BLOCK_M)
    position = offset + first + place
    inside = (first + place < count) & (expert < E)
    entry = position
    if not PACKED:
        entry = tl.load(sorted_ptr + position, mask=inside, other=0)
    block_ptr = entries_ptr + j.to(tl.int64) * BLOCK_M
    tl.store(block_ptr + place, tl.where(inside, entry, R), mask=j < limit)


def plan_blocks(topk_ids: Tensor, num_experts: int, block_rows: int, packed: bool = False) -> Blocks:
    """The block-aligned plan: `routing.reference.plan_blocks` on the GPU, bit for bit.

    One launch for up to 1024 rows, else those of `plan_sort` and one more.

    Args:
        topk_ids: int32 or int64 [T, k]; ids outside [0, E) are in no block.
        num_experts: E.
        block_rows: rows of a block, a power of two.
        packed: entries are sorted positions, not rows.

    Returns:
        The blocks.

    Raises:
        ArgumentError: block_rows is no power of two.
    """
    if block_rows < 1 or block_rows & (block_rows - 1):
        raise ArgumentError(
            "block_rows",
            found=str(block_rows),
            expected="a power of two",
            next_step="Pass the BLOCK_M of the kernel that reads the blocks, e.g. 16, 32, 64 or 128.",
        )
    rows = topk_ids.numel()
    blocks = block_count(rows, num_experts, block_rows)
    entries, experts, padded_total = (
        torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in (blocks * block_rows, blocks, 1)
    )
    grid = (max(blocks, 1),)  # a plan without blocks still has a total
    block_e = max(32, power_of_two(num_experts))
    if rows <= FEW_ROWS:
        block_r = max(128, power_of_two(rows))
        few_blocks_kernel[grid](
            topk_ids.contiguous(),
            entries,
            experts,
            padded_total,
            blocks,
            rows,
            num_experts,
            BLOCK_R=block_r,
            BLOCK_E=block_e,
            BLOCK_M=block_rows,
            PACKED=packed,
            num_warps=few_warps(block_r),
        )
    else:
        route, _ = plan_sort(topk_ids, num_experts, block_rows)
        blocks_kernel[grid](
            route.expert_offsets,
            route.sorted_rows,
            entries,
            experts,
            padded_total,
            blocks,
            rows,
            num_experts,
            BLOCK_E=block_e,
            BLOCK_M=block_rows,
            PACKED=packed,
            num_warps=4,
        )
    return Blocks(entries, experts, padded_total, block_rows, packed)


def few_warps(block_r: int) -> int:
    """Warps of the one launch: no more threads than rows, so that the histogram sees each row in one thread."""
    return min(8, block_r // 32)
