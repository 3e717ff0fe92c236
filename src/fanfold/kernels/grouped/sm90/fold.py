"""The LoRA fold behind the product of a single row (Gluon): expand, where its sums still lie in registers.

y = act(y + scale * act(xa . B^T)); xa is what `kernels.lora` shrank beside the product. The row's pairs, and B of their
first columns, are asked for before the product begins.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

STEP = gl.constexpr(16)
"""Columns of the rank that a product of the matrix unit takes."""


@gluon.constexpr_function
def layout_of_sums(warps):
    """Layout [ROWS, BT] of sums of `mma_v2`: that of wgmma too, a warp has 16 rows."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.jit
def _times(a, b):
    """a * b, rounded before anything is added to it."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _entry(table, half: gl.constexpr, slot, expert, slots, experts):
    """Address of B, padded rank and scale of a pair.

    Without a pair the rank is 0 and the scale -0.0: the change is a product with 0 then, and y + -0.0 is y to the bit.
    """
    a_ptr, b_ptr, scale_ptr, rank_ptr = table
    there = (slot >= 0) & (slot < slots) & (expert < experts)
    at = (half * slots + slot).to(gl.int64) * experts + expert
    a = gl.load(a_ptr + at, mask=there, other=0)
    b = gl.load(b_ptr + at, mask=there, other=0)
    rank = gl.load(rank_ptr + at, mask=there, other=0)
    scale = gl.load(scale_ptr + at, mask=there, other=0.0)
    return b, gl.where(a != 0, (rank + 7) // 8 * 8, 0), gl.where(a != 0, scale, -0.0)


@gluon.jit
def find_pairs(fold, position, expert, HALVES: gl.constexpr):
    """Entries of gate's pair and up's (or twice that of the one projection) for the row at a position."""
    _, _, _, table, ids_ptr, slots, experts, top_k = fold
    slot = gl.load(ids_ptr + position // top_k)
    first = _entry(table, 0, slot, expert, slots, experts)
    return first, _entry(table, HALVES - 1, slot, expert, slots, experts)


@gluon.jit
def load_b(pairs, row0, N, r0, ROWS: gl.constexpr, HALVES: gl.constexpr, dtype: gl.constexpr):
    """B of weight rows row0 on, columns r0 .. r0 + STEP of the rank; zeros behind the rank, and behind N."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=layout_of_sums(gl.num_warps()), k_width=2)
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, operand))
    r = r0 + gl.arange(0, STEP, layout=gl.SliceLayout(0, operand))
    gate, up = pairs
    is_up = row // 8 % 2 == 1
    n = row // 16 * 8 + row % 8 if HALVES == 2 else row
    rank = gl.where(is_up, up[1], gate[1])
    b_ptr = gl.where(is_up, up[0], gate[0]).to(gl.pointer_type(dtype))
    b_ptrs = gl.multiple_of(b_ptr + n.to(gl.int64) * rank, [16])
    return gl.load(b_ptrs[:, None] + r[None, :], mask=(n < N)[:, None] & (r[None, :] < rank[:, None]), other=0.0)


@gluon.jit
def _load_xa(xa_ptr, r0, rank, BT: gl.constexpr, mma: gl.constexpr):
    """xa of the row, columns r0 .. r0 + STEP, in the first column of [STEP, BT]; zeros elsewhere."""
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=2)
    r = r0 + gl.arange(0, STEP, layout=gl.SliceLayout(1, operand))
    column = gl.arange(0, BT, layout=gl.SliceLayout(0, operand))
    xa_ptrs = gl.broadcast((xa_ptr + r)[:, None], column[None, :])[0]
    return gl.load(xa_ptrs, mask=(r < rank)[:, None] & (column == 0)[None, :], other=0.0)


@gluon.jit
def fold_row(acc, b, pairs, position, row0, N, fold, dtype: gl.constexpr, HALVES: gl.constexpr):
    """act(acc) with the change of its row's adapter, in fp32, rounded; without one it keeps its bits.

    Operands:
        acc: fp32 [ROWS, BT] of weight rows row0 on (gate and up by turns of 8 where HALVES is 2); the first column.
        b, pairs: of `load_b` and `find_pairs`. position: of the row.
        fold: xa pointer and its strides (of a row, of a half), table (A, B, scale, rank), ids of tokens, slots and
            experts of the table, rows of a token.
    """
    xa_ptr, stride_xa, stride_half, _, _, _, _, _ = fold
    ROWS: gl.constexpr = acc.shape[0]
    BT: gl.constexpr = acc.shape[1]
    mma: gl.constexpr = layout_of_sums(gl.num_warps())
    gate, up = pairs
    xa_ptr += position.to(gl.int64) * stride_xa
    is_up = (row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, b.type.layout))) // 8 % 2 == 1
    delta = gl.zeros([ROWS, BT], gl.float32, layout=mma)
    for r0 in range(0, gl.maximum(gate[1], up[1]), STEP):
        if r0 > 0:
            b = load_b(pairs, row0, N, r0, ROWS, HALVES, dtype)
        xa = _load_xa(xa_ptr, r0, gate[1], BT, mma)
        if HALVES == 2:  # one after the other, with zeros in the rows of the other half
            xa_up = _load_xa(xa_ptr + stride_half, r0, up[1], BT, mma)
            delta = mma_v2(gl.where(is_up[:, None], gl.zeros_like(b), b), xa, delta)
            delta = mma_v2(gl.where(is_up[:, None], b, gl.zeros_like(b)), xa_up, delta)
        else:
            delta = mma_v2(b, xa, delta)
    row = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    scale = gl.where(row // 8 % 2 == 1, up[2], gate[2])
    y = gl.convert_layout(acc, mma, assert_trivial=True).to(dtype).to(gl.float32)
    return (y + _times(scale[:, None], delta.to(dtype).to(gl.float32))).to(dtype).to(gl.float32)
