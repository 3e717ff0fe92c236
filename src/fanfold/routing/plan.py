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
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.routing.plan_kernels import count_kernel, place_kernel, plan_kernel
from fanfold.routing.sizes import power_of_two, work_slots
from fanfold.spec.route import Route
from fanfold.spec.work import WorkItems, WorkList

# Where one launch is taken, whose programs each read all ids: measured on an H200 (docs/measured.md).
ONE_LAUNCH_ROWS = 4096
ONE_LAUNCH_READS = 2**21

MOST_EXPERTS = 2**15
MOST_TILE = 2**16 - 1
"""What a word of work has room for."""
COUNT_BLOCK = 256  # ids that a program of the first launch counts at once; more spill with 4096 experts
COUNTS_IN_REGISTERS = 8192  # counts that a program of the second launch loads at once


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
