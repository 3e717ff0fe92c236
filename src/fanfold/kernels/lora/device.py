"""Shrink, expand and fold of one tile of rows that share an adapter (device functions).

A and B are the left operands of the matrix units and rows the columns of the right one, so that few rows waste little.
K is cut into SPLIT parts, one a warp: each part's product runs over its own inputs in order, and the parts are added
last, in order. So the sum of a row is the same whatever the tile, the step or the other rows. Outputs are cut into
SPLIT parts as well. A product of three dimensions is one of SPLIT matrices, each in the matrix unit of a warp.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def wait_for_the_kernel_before(CHAINED: tl.constexpr):
    """In every program of a chained launch, or the next kernel would not wait for the one before either.

    The next one is not let in early: its programs would take the places of this one's.
    """
    if CHAINED:
        gdc_wait()


@triton.jit
def planned_rows(source, i, counts, unknown_ptr, slots, BLOCK_M: tl.constexpr):
    """Expert, adapter slot (-1: base), positions, rows and mask of work item i; expert -1: no work."""
    m = tl.arange(0, BLOCK_M)
    at = source.items + i.to(tl.int64) * 4
    expert = tl.load(at)
    slot = tl.load(at + 1)
    first = tl.load(at + 2)
    on = m < tl.load(at + 3)
    position = tl.load(source.positions + first + m, mask=on, other=0)
    row = tl.load(source.rows + first + m, mask=on, other=0)
    return expert, slot, position, row, on


@triton.jit
def gathered_rows(source, i, counts, unknown_ptr, slots, BLOCK_M: tl.constexpr):
    """The same for place i of a batch without a plan: one row. `counts`: this program counts an id >= slots."""
    m = tl.arange(0, BLOCK_M)
    row = i
    if source.sorted_rows is not None:
        row = tl.load(source.sorted_rows + i)
    wide = tl.load(source.expert_ids + row)
    expert = tl.where((wide >= 0) & (wide < 2**31 - 1), wide, -1).to(tl.int32)  # before an int64 id is narrowed
    slot = source.one_slot
    if source.adapter_ids is not None:
        slot = tl.load(source.adapter_ids + row // source.top_k)
        if unknown_ptr is not None:  # a token is counted once, at its first row
            tl.atomic_add(unknown_ptr, 1, mask=counts & (slot >= slots) & (row % source.top_k == 0))
    slot = tl.where(slot < slots, slot, -1)
    rows = tl.zeros((BLOCK_M,), tl.int32) + row
    return expert, slot, tl.zeros((BLOCK_M,), tl.int32) + i, rows, m < 1


@triton.jit
def find_pair(table, half, expert, slot, slots, table_experts, dtype: tl.constexpr):
    """Pointers to A and B, scale and padded rank of an entry; rank 0 where there is no pair."""
    there = (slot >= 0) & (expert >= 0) & (expert < table_experts)
    at = (half * slots + slot).to(tl.int64) * table_experts + expert
    a = tl.load(table.a + at, mask=there, other=0)
    b = tl.load(table.b + at, mask=there, other=0)
    scale = tl.load(table.scale + at, mask=there, other=0.0)
    rank = tl.load(table.rank + at, mask=there, other=0)
    rank = tl.where(a != 0, (rank + 7) // 8 * 8, 0)
    a_ptr = tl.multiple_of(a.to(tl.pointer_type(dtype)), 16)
    b_ptr = tl.multiple_of(b.to(tl.pointer_type(dtype)), 16)
    return a_ptr, b_ptr, scale, rank


@triton.jit
def part_of(K, SPLIT: tl.constexpr):
    """Inputs of a part: a multiple of 64, and so of any step."""
    return tl.cdiv(tl.cdiv(K, SPLIT), 64) * 64


@triton.jit
def shrink(
    x_rows, on, a_ptr, rank, a2_ptr, rank2, r0, K, stop,
    HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns r0 .. r0 + BLOCK_R of act(x A^T) as [BLOCK_R, BLOCK_M], and of a second A over the same loads of x.

    stop: `part_of(K)`, or 0 where there is nothing to sum.
    """
    dtype: tl.constexpr = x_rows.dtype.element_ty
    STEP: tl.constexpr = BLOCK_K // SPLIT
    part = part_of(K, SPLIT)
    r = r0 + tl.arange(0, BLOCK_R)
    k = tl.arange(0, SPLIT)[:, None] * part + tl.arange(0, STEP)[None, :]
    x_ptrs = x_rows[None, None, :] + k[:, :, None]
    a_at = r.to(tl.int64)[None, :, None] * K + k[:, None, :]
    acc = tl.zeros((SPLIT, BLOCK_R, BLOCK_M), tl.float32)
    acc2 = acc
    for k0 in tl.range(0, stop, STEP, num_stages=STAGES):
        inside = k0 + k < K
        x = tl.load(x_ptrs + k0, mask=on[None, None, :] & inside[:, :, None], other=0.0)
        a = tl.load(a_ptr + a_at + k0, mask=(r < rank)[None, :, None] & inside[:, None, :], other=0.0)
        acc = tl.dot(a, x, acc, input_precision="ieee")
        if HALVES == 2:
            a2 = tl.load(a2_ptr + a_at + k0, mask=(r < rank2)[None, :, None] & inside[:, None, :], other=0.0)
            acc2 = tl.dot(a2, x, acc2, input_precision="ieee")
    xa = tl.sum(acc, 0).to(dtype)
    xa2 = xa
    if HALVES == 2:
        xa2 = tl.sum(acc2, 0).to(dtype)
    return xa, xa2


@triton.jit
def load_b(b_ptr, rank, r0, n, N, BLOCK_R: tl.constexpr):
    """B of outputs n [SPLIT, columns], [SPLIT, columns, BLOCK_R]; zeros behind the rank."""
    r = r0 + tl.arange(0, BLOCK_R)
    at = n.to(tl.int64)[:, :, None] * rank + r[None, None, :]
    return tl.load(b_ptr + at, mask=(r < rank)[None, None, :] & (n < N)[:, :, None], other=0.0)


@triton.jit
def add_delta(acc, b, xa, SPLIT: tl.constexpr):
    """Sum: acc [SPLIT, columns, BLOCK_M] + b [SPLIT, columns, BLOCK_R] . xa [BLOCK_R, BLOCK_M]."""
    wide = tl.broadcast_to(xa[None, :, :], (SPLIT, xa.shape[0], xa.shape[1]))
    return tl.dot(b, wide, acc, input_precision="ieee")


@triton.jit
def round_to(value, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """fp32 to the activations' dtype. ASSEMBLY: two at a time; ptxas converts single ones at a quarter of the rate."""
    if ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [value], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif ASSEMBLY and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [value], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return value.to(dtype)


@triton.jit
def fold(y, acc, scale, ASSEMBLY: tl.constexpr):
    """y + scale * delta, with delta rounded and the multiply apart from the add."""
    delta = round_to(acc, y.dtype, ASSEMBLY).to(tl.float32)
    return round_to(y.to(tl.float32) + scale * delta, y.dtype, ASSEMBLY)
