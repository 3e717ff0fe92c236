"""The LoRA fold in Triton: shrink and expand as two launches, or as one where the rank fits in one program.

A program takes the rows of one (expert, adapter slot): an item of the plan, or a single row without one. FIND, one of
`device.planned_rows` and `device.gathered_rows`, says which.

Operands and constants of all three kernels:
    x_ptr: [T, K] with GATHER_X (row of x = token), else [R, K] at positions.
    y_ptr: [R, HALVES * N], the base product, gate first; at positions, with SCATTER at rows. With PARTS > 1 fp32
        [PARTS, R, N]: its sum, in order and rounded, is the base product; what is folded goes into the first part, and
        0 into the others.
    h_ptr: [R, N] at positions, where an ACTIVATION follows; y is not written then. Rows of the base are left alone.
    xa_ptr: [HALVES, cap, stride_xa], at position - row_offset.
    table: `AdapterTable` as `Entries`. source: `Planned` or `Gathered`, see `operands`.
    unknown_ptr: int32 [1] that counts tokens with ids >= slots, or None.
    HALVES: 2 for gate and up, else 1.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fanfold.kernels.common.activations import activate
from fanfold.kernels.lora.device import (
    add_delta,
    find_pair,
    fold,
    load_b,
    part_of,
    round_to,
    shrink,
    wait_for_the_kernel_before,
)


@triton.jit
def columns_of(n0, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Outputs n0 .. n0 + BLOCK_N as [SPLIT, BLOCK_N / SPLIT]."""
    PART: tl.constexpr = BLOCK_N // SPLIT
    return n0 + tl.arange(0, SPLIT)[:, None] * PART + tl.arange(0, PART)[None, :]


@triton.jit
def load_y(y_ptrs, mask, stride_part, PARTS: tl.constexpr, ASSEMBLY: tl.constexpr, dtype: tl.constexpr):
    """The base product: as it lies, or the sum of its parts."""
    y = tl.load(y_ptrs, mask=mask, other=0.0)
    if PARTS > 1:
        for i in tl.static_range(1, PARTS):
            y += tl.load(y_ptrs + i * stride_part.to(tl.int64), mask=mask, other=0.0)
        y = round_to(y, dtype, ASSEMBLY)
    return y


@triton.jit
def load_columns(
    y_rows, on, b, rank, b2, rank2, n, N, stride_part,
    HALVES: tl.constexpr, PARTS: tl.constexpr, BLOCK_R: tl.constexpr, ASSEMBLY: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Tiles of B and y of outputs n, of both halves (or the first twice)."""
    mask = on[None, None, :] & (n < N)[:, :, None]
    y_ptrs = y_rows + n[:, :, None]
    bt = load_b(b, rank, 0, n, N, BLOCK_R)
    y = load_y(y_ptrs, mask, stride_part, PARTS, ASSEMBLY, dtype)
    bt2, y2 = bt, y
    if HALVES == 2:
        bt2 = load_b(b2, rank2, 0, n, N, BLOCK_R)
        y2 = tl.load(y_ptrs + N, mask=mask, other=0.0)
    return bt, y, bt2, y2


@triton.jit
def store_columns(
    y_rows, h_rows, on, y, y2, acc, acc2, scale, rank, scale2, rank2, n, N, stride_part, alpha, limit,
    HALVES: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Folds and stores a tile; y of a half without a pair is not written, bit for bit."""
    mask = on[None, None, :] & (n < N)[:, :, None]
    y_ptrs = y_rows + n[:, :, None]
    folded = fold(y, acc, scale, ASSEMBLY)
    folded2 = folded
    if HALVES == 2:
        folded2 = fold(y2, acc2, scale2, ASSEMBLY)
    if ACTIVATION is None:
        tl.store(y_ptrs, folded.to(y_rows.dtype.element_ty), mask=mask & (rank > 0))
        for i in tl.static_range(1, PARTS):
            rest = y_ptrs + i * stride_part.to(tl.int64)
            tl.store(rest, tl.zeros_like(folded).to(tl.float32), mask=mask & (rank > 0))
        if HALVES == 2:
            tl.store(y_ptrs + N, folded2, mask=mask & (rank2 > 0))
    else:
        gate = tl.where(rank > 0, folded, y)
        up = tl.where(rank2 > 0, folded2, y2) if HALVES == 2 else gate
        h = activate(gate, up, alpha, limit, ACTIVATION)
        tl.store(h_rows + n[:, :, None], h.to(y.dtype), mask=mask)


@triton.jit
def fold_columns(
    loaded, y_rows, h_rows, on, xa, xa2, scale, rank, scale2, rank2, n, N, stride_part, alpha, limit,
    HALVES: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, SPLIT: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Expands and folds what `load_columns` loaded."""
    bt, y, bt2, y2 = loaded
    zero = tl.zeros((SPLIT, n.shape[1], xa.shape[1]), tl.float32)
    acc = add_delta(zero, bt, xa, SPLIT)
    acc2 = acc
    if HALVES == 2:
        acc2 = add_delta(zero, bt2, xa2, SPLIT)
    store_columns(
        y_rows, h_rows, on, y, y2, acc, acc2, scale, rank, scale2, rank2, n, N, stride_part, alpha, limit,
        HALVES, PARTS, ACTIVATION, ASSEMBLY,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "tiles", "top_k", "slots", "experts", "alpha", "limit"])
def fold_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, h_ptr: tl.tensor, table: tl.tuple, source: tl.tuple, unknown_ptr: tl.tensor,
    parts: tl.tensor, tiles: tl.tensor, top_k: tl.tensor, slots: tl.tensor, experts: tl.tensor, K: tl.tensor,
    N: tl.tensor, stride_x: tl.tensor, stride_y: tl.tensor, stride_part: tl.tensor, stride_h: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor,
    FIND: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, GATHER_X: tl.constexpr, SCATTER: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr, ASSEMBLY: tl.constexpr,
    ONE_TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Shrink and expand in one: `parts` programs share an item; each shrinks, and folds `tiles` tiles of outputs."""
    wait_for_the_kernel_before(CHAINED)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    item = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    expert, slot, position, row, on = FIND(source, item, part == 0, unknown_ptr, slots, BLOCK_M)
    if (expert < 0) | (slot < 0):
        return
    a, b, scale, rank = find_pair(table, 0, expert, slot, slots, experts, dtype)
    a2, b2, scale2, rank2 = a, b, scale, 0
    if HALVES == 2:
        a2, b2, scale2, rank2 = find_pair(table, 1, expert, slot, slots, experts, dtype)
    most = tl.maximum(rank, rank2)
    if (most == 0) & (ACTIVATION is None):
        return
    y_row = row if SCATTER else position
    y_rows = y_ptr + y_row.to(tl.int64)[None, None, :] * stride_y
    h_rows = y_rows
    if ACTIVATION is not None:
        h_rows = h_ptr + position.to(tl.int64)[None, None, :] * stride_h
    n = columns_of(part * tiles * BLOCK_N, BLOCK_N, SPLIT)
    if ONE_TILE:  # on their way while the rows shrink
        loaded = load_columns(
            y_rows, on, b, rank, b2, rank2, n, N, stride_part, HALVES, PARTS, BLOCK_R, ASSEMBLY, dtype
        )

    x_row = row // top_k if GATHER_X else position
    xa, xa2 = shrink(
        x_ptr + x_row.to(tl.int64) * stride_x, on, a, rank, a2, rank2, 0, K, tl.where(most > 0, part_of(K, SPLIT), 0),
        HALVES, BLOCK_M, BLOCK_R, BLOCK_K, SPLIT, STAGES,
    )  # fmt: skip
    if ONE_TILE:
        fold_columns(
            loaded, y_rows, h_rows, on, xa, xa2, scale, rank, scale2, rank2, n, N, stride_part, alpha, limit,
            HALVES, PARTS, ACTIVATION, SPLIT, ASSEMBLY,
        )  # fmt: skip
    else:
        for _ in range(0, tiles):
            loaded = load_columns(
                y_rows, on, b, rank, b2, rank2, n, N, stride_part, HALVES, PARTS, BLOCK_R, ASSEMBLY, dtype
            )
            fold_columns(
                loaded, y_rows, h_rows, on, xa, xa2, scale, rank, scale2, rank2, n, N, stride_part, alpha, limit,
                HALVES, PARTS, ACTIVATION, SPLIT, ASSEMBLY,
            )  # fmt: skip
            n += BLOCK_N


@triton.jit(do_not_specialize=["parts", "top_k", "slots", "experts", "row_offset", "row_end"])
def shrink_kernel(
    x_ptr: tl.tensor, xa_ptr: tl.tensor, table: tl.tuple, source: tl.tuple, unknown_ptr: tl.tensor, parts: tl.tensor,
    top_k: tl.tensor, slots: tl.tensor, experts: tl.tensor, K: tl.tensor, row_offset: tl.tensor, row_end: tl.tensor,
    stride_x: tl.tensor, stride_xa: tl.tensor, stride_half: tl.tensor,
    FIND: tl.constexpr, HALVES: tl.constexpr, GATHER_X: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    CHAINED: tl.constexpr, LETS_IN: tl.constexpr,
) -> None:  # fmt: skip
    """xa = act(x A^T) of the window's rows: BLOCK_R columns of both halves, by each of `parts` programs of an item."""
    wait_for_the_kernel_before(CHAINED)
    if LETS_IN:  # the product that expands xa, which waits for it behind its sums
        gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    item = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    expert, slot, position, row, on = FIND(source, item, part == 0, unknown_ptr, slots, BLOCK_M)
    if expert < 0:
        return
    a, _, _, rank = find_pair(table, 0, expert, slot, slots, experts, dtype)
    a2, rank2 = a, 0
    if HALVES == 2:
        a2, _, _, rank2 = find_pair(table, 1, expert, slot, slots, experts, dtype)
    on &= (position >= row_offset) & (position < row_end)
    r0 = part * BLOCK_R
    if (r0 >= tl.maximum(rank, rank2)) | (tl.max(on.to(tl.int32), 0) == 0):
        return
    x_row = row // top_k if GATHER_X else position
    xa, xa2 = shrink(
        x_ptr + x_row.to(tl.int64) * stride_x, on, a, rank, a2, rank2, r0, K, part_of(K, SPLIT),
        HALVES, BLOCK_M, BLOCK_R, BLOCK_K, SPLIT, STAGES,
    )  # fmt: skip
    r = r0 + tl.arange(0, BLOCK_R)
    xa_ptrs = xa_ptr + (position - row_offset).to(tl.int64)[None, :] * stride_xa + r[:, None]
    tl.store(xa_ptrs, xa, mask=on[None, :] & (r < rank)[:, None])
    if HALVES == 2:
        tl.store(xa_ptrs + stride_half, xa2, mask=on[None, :] & (r < rank2)[:, None])


@triton.jit
def sum_of(xa_rows, on, b, rank, n, N, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, SPLIT: tl.constexpr):
    """xa B^T of one half in fp32, the rank in steps of BLOCK_R."""
    acc = tl.zeros((SPLIT, n.shape[1], BLOCK_M), tl.float32)
    for r0 in range(0, rank, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        xa = tl.load(xa_rows[None, :] + r[:, None], mask=on[None, :] & (r < rank)[:, None], other=0.0)
        acc = add_delta(acc, load_b(b, rank, r0, n, N, BLOCK_R), xa, SPLIT)
    return acc


@triton.jit(do_not_specialize=["parts", "slots", "experts", "row_offset", "row_end", "alpha", "limit"])
def expand_kernel(
    xa_ptr: tl.tensor, y_ptr: tl.tensor, h_ptr: tl.tensor, table: tl.tuple, source: tl.tuple, parts: tl.tensor,
    slots: tl.tensor, experts: tl.tensor, N: tl.tensor, row_offset: tl.tensor, row_end: tl.tensor, stride_xa: tl.tensor,
    stride_half: tl.tensor, stride_y: tl.tensor, stride_part: tl.tensor, stride_h: tl.tensor,
    alpha: tl.tensor, limit: tl.tensor,
    FIND: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, SCATTER: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, CHAINED: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> None:  # fmt: skip
    """Folds scale * act(xa B^T) of the window's rows: BLOCK_N outputs of both halves, by each of `parts` programs."""
    wait_for_the_kernel_before(CHAINED)
    dtype: tl.constexpr = xa_ptr.dtype.element_ty
    item = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    expert, slot, position, row, on = FIND(source, item, False, None, slots, BLOCK_M)
    if (expert < 0) | (slot < 0):
        return
    _, b, scale, rank = find_pair(table, 0, expert, slot, slots, experts, dtype)
    b2, scale2, rank2 = b, scale, 0
    if HALVES == 2:
        _, b2, scale2, rank2 = find_pair(table, 1, expert, slot, slots, experts, dtype)
    on &= (position >= row_offset) & (position < row_end)
    nothing = (tl.maximum(rank, rank2) == 0) & (ACTIVATION is None)
    if nothing | (tl.max(on.to(tl.int32), 0) == 0):
        return
    y_row = row if SCATTER else position
    y_rows = y_ptr + y_row.to(tl.int64)[None, None, :] * stride_y
    h_rows = y_rows
    if ACTIVATION is not None:
        h_rows = h_ptr + position.to(tl.int64)[None, None, :] * stride_h
    n = columns_of(part * BLOCK_N, BLOCK_N, SPLIT)
    mask = on[None, None, :] & (n < N)[:, :, None]
    xa_rows = xa_ptr + (position - row_offset).to(tl.int64) * stride_xa
    y = load_y(y_rows + n[:, :, None], mask, stride_part, PARTS, ASSEMBLY, dtype)
    acc = sum_of(xa_rows, on, b, rank, n, N, BLOCK_M, BLOCK_R, SPLIT)
    y2, acc2 = y, acc
    if HALVES == 2:
        y2 = tl.load(y_rows + N + n[:, :, None], mask=mask, other=0.0)
        acc2 = sum_of(xa_rows + stride_half, on, b2, rank2, n, N, BLOCK_M, BLOCK_R, SPLIT)
    store_columns(
        y_rows, h_rows, on, y, y2, acc, acc2, scale, rank, scale2, rank2, n, N, stride_part, alpha, limit,
        HALVES, PARTS, ACTIVATION, ASSEMBLY,
    )  # fmt: skip
