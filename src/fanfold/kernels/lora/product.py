"""The LoRA fold in Triton: shrink and expand as two launches, or as one where the rank fits in one program.

A program takes the rows of one (expert, adapter slot): an item of the plan, or a single row without one. FIND, one of
`device.planned_rows` and `device.gathered_rows`, says which.

Operands and constants of all three kernels:
    x_ptr: [T, K] with GATHER_X (row of x = token), else [R, K] at positions.
    y_ptr: [R, HALVES * N], the base product, gate first; at positions, with SCATTER at rows.
    h_ptr: [R, N] at positions, where an ACTIVATION follows; y is not written then.
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

from fanfold.kernels.common.activations import activate
from fanfold.kernels.lora.device import add_delta, chain, find_pair, fold, load_b, shrink


@triton.jit
def columns_of(n0, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr):
    """Outputs n0 .. n0 + BLOCK_N as [SPLIT, BLOCK_N / SPLIT]."""
    PART: tl.constexpr = BLOCK_N // SPLIT
    return n0 + tl.arange(0, SPLIT)[:, None] * PART + tl.arange(0, PART)[None, :]


@triton.jit
def load_tile(y_rows, on, b, rank, n, N, BLOCK_R: tl.constexpr):
    """B and y of outputs n of one projection."""
    mask = on[None, None, :] & (n < N)[:, :, None]
    return load_b(b, rank, 0, n, N, BLOCK_R), tl.load(y_rows + n[:, :, None], mask=mask, other=0.0)


@triton.jit
def fold_tile(bt, y, xa, scale, SPLIT: tl.constexpr, ASSEMBLY: tl.constexpr):
    """A tile of y with the change folded in."""
    zero = tl.zeros((SPLIT, y.shape[1], y.shape[2]), tl.float32)
    return fold(y, add_delta(zero, bt, xa, SPLIT), scale, ASSEMBLY)


@triton.jit
def store_tile(y_rows, y, on, rank, n, N):
    """Stores a tile of y; without a pair y is not written, bit for bit."""
    tl.store(y_rows + n[:, :, None], y, mask=on[None, None, :] & (n < N)[:, :, None] & (rank > 0))


@triton.jit
def store_h(
    h_rows, y, y2, folded, folded2, on, rank, rank2, n, N, alpha, limit,
    HALVES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The activation of a tile, folded where there are pairs."""
    gate = tl.where(rank > 0, folded, y)
    up = tl.where(rank2 > 0, folded2, y2) if HALVES == 2 else gate
    h = activate(gate, up, alpha, limit, ACTIVATION).to(y.dtype)
    tl.store(h_rows + n[:, :, None], h, mask=on[None, None, :] & (n < N)[:, :, None])


@triton.jit
def fold_columns(
    y_rows, on, b, rank, scale, xa, n, N, tiles,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Folds `tiles` tiles of y from outputs n on, in place."""
    for _ in range(0, tiles):
        bt, y = load_tile(y_rows, on, b, rank, n, N, BLOCK_R)
        store_tile(y_rows, fold_tile(bt, y, xa, scale, SPLIT, ASSEMBLY), on, rank, n, N)
        n += BLOCK_N


@triton.jit(do_not_specialize=["alpha", "limit", "tiles"])
def fold_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, h_ptr: tl.tensor, table: tl.tuple, source: tl.tuple, unknown_ptr: tl.tensor,
    top_k: tl.tensor, slots: tl.tensor, experts: tl.tensor, K: tl.tensor, N: tl.tensor, stride_x: tl.tensor,
    stride_y: tl.tensor, stride_h: tl.tensor, tiles: tl.tensor, alpha: tl.tensor, limit: tl.tensor,
    FIND: tl.constexpr, HALVES: tl.constexpr, MADE: tl.constexpr, GATHER_X: tl.constexpr, SCATTER: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    CHAINED: tl.constexpr, ASSEMBLY: tl.constexpr, ONE_TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Shrink and expand in one: PARTS programs share an item; each shrinks, and folds `tiles` tiles of outputs.

    MADE: halves that a program makes; where it is 1 of 2, the second half of the programs makes up.
    """
    chain(CHAINED)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    item = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    expert, slot, position, row, on = FIND(source, item, part == 0, unknown_ptr, slots, BLOCK_M)
    if expert < 0:
        return
    half = part * HALVES // (PARTS * MADE)
    first = (part - half * (PARTS * MADE // HALVES)) * tiles * BLOCK_N
    a, b, scale, rank = find_pair(table, half, expert, slot, slots, experts, dtype)
    a2, b2, scale2, rank2 = a, b, scale, 0
    if MADE == 2:
        a2, b2, scale2, rank2 = find_pair(table, 1, expert, slot, slots, experts, dtype)
    most = tl.maximum(rank, rank2)
    if (most == 0) & (ACTIVATION is None):
        return
    y_row = row if SCATTER else position
    y_rows = y_ptr + y_row.to(tl.int64)[None, None, :] * stride_y + half * N
    n = columns_of(first, BLOCK_N, SPLIT)
    if ONE_TILE:  # on their way while the rows shrink
        bt, y = load_tile(y_rows, on, b, rank, n, N, BLOCK_R)
        bt2, y2 = bt, y
        if MADE == 2:
            bt2, y2 = load_tile(y_rows + N, on, b2, rank2, n, N, BLOCK_R)

    x_row = row // top_k if GATHER_X else position
    xa, xa2 = shrink(
        x_ptr + x_row.to(tl.int64) * stride_x, on, a, rank, a2, rank2, 0, K, tl.where(most > 0, K, 0),
        MADE, BLOCK_M, BLOCK_R, STEP, SPLIT, CHUNK, STAGES, EVEN_K,
    )  # fmt: skip

    if ACTIVATION is not None:
        h_rows = h_ptr + position.to(tl.int64)[None, None, :] * stride_h
        for _ in range(0, tiles):
            if not ONE_TILE:
                bt, y = load_tile(y_rows, on, b, rank, n, N, BLOCK_R)
                bt2, y2 = bt, y
                if MADE == 2:
                    bt2, y2 = load_tile(y_rows + N, on, b2, rank2, n, N, BLOCK_R)
            folded = fold_tile(bt, y, xa, scale, SPLIT, ASSEMBLY)
            folded2 = folded
            if MADE == 2:
                folded2 = fold_tile(bt2, y2, xa2, scale2, SPLIT, ASSEMBLY)
            store_h(h_rows, y, y2, folded, folded2, on, rank, rank2, n, N, alpha, limit, MADE, ACTIVATION)
            n += BLOCK_N
    elif ONE_TILE:
        store_tile(y_rows, fold_tile(bt, y, xa, scale, SPLIT, ASSEMBLY), on, rank, n, N)
        if MADE == 2:
            store_tile(y_rows + N, fold_tile(bt2, y2, xa2, scale2, SPLIT, ASSEMBLY), on, rank2, n, N)
    else:
        fold_columns(y_rows, on, b, rank, scale, xa, n, N, tiles, BLOCK_R, BLOCK_N, SPLIT, ASSEMBLY)
        if MADE == 2:
            fold_columns(y_rows + N, on, b2, rank2, scale2, xa2, n, N, tiles, BLOCK_R, BLOCK_N, SPLIT, ASSEMBLY)


@triton.jit(do_not_specialize=["row_offset", "row_end"])
def shrink_kernel(
    x_ptr: tl.tensor, xa_ptr: tl.tensor, table: tl.tuple, source: tl.tuple, unknown_ptr: tl.tensor, top_k: tl.tensor,
    slots: tl.tensor, experts: tl.tensor, K: tl.tensor, row_offset: tl.tensor, row_end: tl.tensor,
    stride_x: tl.tensor, stride_xa: tl.tensor, stride_half: tl.tensor,
    FIND: tl.constexpr, HALVES: tl.constexpr, GATHER_X: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr, EVEN_K: tl.constexpr,
    SPLIT: tl.constexpr,     STAGES: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr,
) -> None:  # fmt: skip
    """xa = act(x A^T) of the window's rows: BLOCK_R columns of both halves, by each of PARTS programs of an item."""
    chain(CHAINED)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    item = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
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
        x_ptr + x_row.to(tl.int64) * stride_x, on, a, rank, a2, rank2, r0, K, K,
        HALVES, BLOCK_M, BLOCK_R, STEP, SPLIT, CHUNK, STAGES, EVEN_K,
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


@triton.jit(do_not_specialize=["alpha", "limit", "row_offset", "row_end"])
def expand_kernel(
    xa_ptr: tl.tensor, y_ptr: tl.tensor, h_ptr: tl.tensor, table: tl.tuple, source: tl.tuple, slots: tl.tensor,
    experts: tl.tensor, N: tl.tensor, row_offset: tl.tensor, row_end: tl.tensor, stride_xa: tl.tensor,
    stride_half: tl.tensor, stride_y: tl.tensor, stride_h: tl.tensor, alpha: tl.tensor, limit: tl.tensor,
    FIND: tl.constexpr, HALVES: tl.constexpr, SCATTER: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, CHAINED: tl.constexpr, ASSEMBLY: tl.constexpr,
) -> None:  # fmt: skip
    """Folds scale * act(xa B^T) of the window's rows: BLOCK_N outputs of both halves, by each of PARTS programs."""
    chain(CHAINED)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    item = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    expert, slot, position, row, on = FIND(source, item, False, None, slots, BLOCK_M)
    if expert < 0:
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
    n = columns_of(part * BLOCK_N, BLOCK_N, SPLIT)
    xa_rows = xa_ptr + (position - row_offset).to(tl.int64) * stride_xa
    mask = on[None, None, :] & (n < N)[:, :, None]
    y = tl.load(y_rows + n[:, :, None], mask=mask, other=0.0)
    folded = fold(y, sum_of(xa_rows, on, b, rank, n, N, BLOCK_M, BLOCK_R, SPLIT), scale, ASSEMBLY)
    if ACTIVATION is None:
        store_tile(y_rows, folded, on, rank, n, N)
    y2, folded2 = y, folded
    if HALVES == 2:
        y2 = tl.load(y_rows + N + n[:, :, None], mask=mask, other=0.0)
        acc2 = sum_of(xa_rows + stride_half, on, b2, rank2, n, N, BLOCK_M, BLOCK_R, SPLIT)
        folded2 = fold(y2, acc2, scale2, ASSEMBLY)
        if ACTIVATION is None:
            store_tile(y_rows + N, folded2, on, rank2, n, N)
    if ACTIVATION is not None:
        h_rows = h_ptr + position.to(tl.int64)[None, None, :] * stride_h
        store_h(h_rows, y, y2, folded, folded2, on, rank, rank2, n, N, alpha, limit, HALVES, ACTIVATION)
