"""Work items of the Hopper product: an item in one word, its rows beside it, so that one load leads to the first x."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Triton's builtins carry no types.)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.route import Route
from fanfold.spec.work import WorkList

MOST_EXPERTS = 2**15  # what the word has room for


@dataclass(frozen=True, eq=False)
class WorkItems:
    """A work list as the product reads it.

    Attributes:
        items: int64 [S]: expert << 48 | rows << 32 | first sorted position; -1 holds no work. Where `single`, int32
            or int64 [R]: the expert of each row; ids outside [0, E) hold no work.
        rows: int32 [S, tile], rows of each item, unset behind their count; where `single`, `items` again.
        total: R.
        tile: most rows of an item; 1 where `single`.
        single: an item is one row, and rows keep their order: sorted position = row.
        num_experts: E.
    """

    items: Tensor
    rows: Tensor
    total: int
    tile: int
    single: bool
    num_experts: int


@triton.jit
def tiled_kernel(
    slots_ptr: tl.tensor, sorted_ptr: tl.tensor, items_ptr: tl.tensor, rows_ptr: tl.tensor, TILE: tl.constexpr
) -> None:
    """The word and the rows of slot program_id(0)."""
    slot = tl.program_id(0).to(tl.int64)
    expert = tl.load(slots_ptr + slot * 4).to(tl.int64)
    first = tl.load(slots_ptr + slot * 4 + 1)
    count = tl.load(slots_ptr + slot * 4 + 2)
    item = (expert << 48) | (count.to(tl.int64) << 32) | first.to(tl.int64)
    tl.store(items_ptr + slot, tl.where(expert < 0, -1, item))
    t = tl.arange(0, TILE)
    inside = (t < count) & (expert >= 0)
    rows = tl.load(sorted_ptr + first + t, mask=inside, other=0)
    tl.store(rows_ptr + slot * TILE + t, rows, mask=inside)


def tiled_items(route: Route, work: WorkList) -> WorkItems:
    """Work items of a plan.

    Args:
        route: of `routing.plan.plan_sort`.
        work: of the same plan; `tile` is the block_t of the config.

    Raises:
        ArgumentError: an array is not that of a plan.
    """
    op, total, tile = "tiled_items", route.sorted_rows.numel(), work.tile
    _check(op, "route.sorted_rows", route.sorted_rows, [total], torch.int32)
    if tile < 1 or tile & (tile - 1):
        raise _wrong(op, "work.tile", str(tile), "a power of two")
    if route.num_experts > MOST_EXPERTS:
        raise _wrong(op, "route.expert_offsets", f"{route.num_experts} experts", f"at most {MOST_EXPERTS}")
    _check(op, "work.slots", work.slots, [total // tile + route.num_experts, 4], torch.int32)
    _check_device(op, "route.sorted_rows", route.sorted_rows, work.slots.device)
    slots = work.slots.shape[0]
    items = torch.empty(slots, dtype=torch.int64, device=work.slots.device)
    rows = torch.empty((slots, tile), dtype=torch.int32, device=work.slots.device)
    if slots:
        tiled_kernel[(slots,)](work.slots, route.sorted_rows, items, rows, TILE=tile, num_warps=1)
    return WorkItems(items, rows, total, tile, False, route.num_experts)


def single_items(topk_ids: Tensor, num_experts: int) -> WorkItems:
    """Work items of a few tokens, one a row, without a plan and without a launch: the ids as they are.

    Args:
        topk_ids: int32 or int64 [T, k], contiguous (else they are copied); ids outside [0, E) are experts of another
            rank. They are read when the products run.
        num_experts: E.

    Raises:
        ArgumentError: topk_ids are no such array.
    """
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        found = f"{topk_ids.dtype} {list(topk_ids.shape)}".removeprefix("torch.")
        raise _wrong("single_items", "topk_ids", found, "int32 or int64 [T, k]")
    ids = topk_ids.reshape(-1)
    return WorkItems(ids, ids, ids.shape[0], 1, True, num_experts)


def _check(op: str, name: str, tensor: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    if list(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        found = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
        raise _wrong(op, name, found, f"contiguous {str(dtype).removeprefix('torch.')} {shape}")


def _check_device(op: str, name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise _wrong(op, name, str(tensor.device), f"{device}, where the work list is")


def _wrong(op: str, what: str, found: str, expected: str) -> ArgumentError:
    return ArgumentError(f"{op}: {what}", found=found, expected=expected, next_step="Pass both results of plan_sort.")
