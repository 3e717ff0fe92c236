"""Act-order of gate and up: x brought into the order in which each row's expert reads its inputs."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Triton's builtins carry no types.)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.spec.work import WorkItems

ROWS = 8
"""Rows of a program, which reads the order once."""


@triton.jit
def reorder_kernel(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    out_ptr: tl.tensor,
    work_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    experts: tl.tensor,
    top_k: tl.tensor,
    K: tl.tensor,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS rows of item program_id(0), two at a time: their 16-bit values pass shared memory as one word."""
    slot = tl.program_id(0).to(tl.int64)
    item = tl.load(work_ptr + slot).to(tl.int64)
    if SINGLE:
        expert, start = item, slot
        count = tl.where((item >= 0) & (item < experts), 1, 0)
    else:
        expert, start = item >> 48, item & 0xFFFFFFFF
        count = tl.where(item < 0, 0, (item >> 32) & 0xFFFF).to(tl.int32)
    first = tl.program_id(1) * ROWS
    if first < count:
        k = tl.arange(0, BLOCK)
        inside = k < K
        order = tl.load(order_ptr + expert * K + k, mask=inside, other=0)
        for t in range(first, tl.minimum(first + ROWS, count), 2):
            both = t + 1 < count
            if SINGLE:
                row, row_after = slot, slot
            else:
                row = tl.load(rows_ptr + slot * TILE + t).to(tl.int64)
                row_after = tl.load(rows_ptr + slot * TILE + t + 1, mask=both, other=0).to(tl.int64)
            low = tl.load(x_ptr + row // top_k * K + k, mask=inside, other=0).to(tl.int32)
            high = tl.load(x_ptr + row_after // top_k * K + k, mask=inside & both, other=0).to(tl.int32)
            words = tl.gather((low & 0xFFFF) | (high << 16), order, 0)
            out = out_ptr + (start + t) * K + k
            tl.store(out, words.to(tl.int16), mask=inside)
            tl.store(out + K, (words >> 16).to(tl.int16), mask=inside & both)


def reorder_arguments(x: Tensor, order: Tensor, out: Tensor, work: WorkItems, top_k: int) -> dict[str, Any]:
    """Arguments and launch options of `reorder_kernel`, by name."""
    k = x.shape[1]
    block = triton.next_power_of_2(k)
    return dict(
        x_ptr=x.view(torch.int16),
        order_ptr=order,
        out_ptr=out.view(torch.int16),
        work_ptr=work.items,
        rows_ptr=work.rows,
        experts=order.shape[0],
        top_k=top_k,
        K=k,
        TILE=work.tile,
        ROWS=ROWS,
        SINGLE=work.single,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )


def reorder(x: Tensor, order: Tensor, work: WorkItems, top_k: int) -> Tensor:
    """Rows of x [T, K], 16-bit, at sorted positions [R, K], with inputs in the order [E, K] of their expert."""
    out = x.new_empty((work.total, x.shape[1]))
    if out.numel():
        arguments = reorder_arguments(x, order, out, work, top_k)
        reorder_kernel[(work.items.shape[0], -(-work.tile // ROWS))](**arguments)
    return out
