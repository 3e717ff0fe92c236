"""What follows the product of one work item (Gluon): scale of the matrix, bias, rounding, fold, activation, store."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fanfold.kernels.grouped.sm90.fold import fold_row


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _activate(gate, up, alpha, limit, KIND: gl.constexpr):
    """As `kernels.common.activations.activate`, which Gluon can't call; to the bit."""
    if KIND == "silu":
        return gate * _sigmoid(gate) * up
    elif KIND == "gelu_tanh":
        twice = 1.5957691216057308 * gl.fma(0.044715 * gate * gate, gate, gate)
        return gate * _sigmoid(twice) * up
    else:
        gl.static_assert(KIND == "clamped_swiglu")
        gate = gl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = gl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = gl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * (gate * _sigmoid(alpha * gate))


@gluon.jit
def _relu2(x):
    x = gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x * x


@gluon.constexpr_function
def _lines(outputs, warps):
    """Layout [outputs, tokens] in which a thread holds 8 neighbours of a row of the result."""
    lanes = outputs // 8 if outputs < 256 else 32
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def _store(y, y_ptr, rows_ptr, start, count, n0, N, stride_y, SCATTER: gl.constexpr, BN: gl.constexpr):
    """Stores y [BN, BT] as BT rows of the outputs n0 on that lie below N."""
    BT: gl.constexpr = y.shape[1]
    if y.dtype == gl.float32:
        layout: gl.constexpr = y.type.layout  # 8 lanes hold 8 neighbours: whole sectors as they are
    else:
        layout: gl.constexpr = _lines(BN, gl.num_warps())
        y = gl.convert_layout(y, layout)
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, BT, layout=gl.SliceLayout(0, layout))
    valid = token < count
    row = start + token
    if SCATTER:
        row = gl.load(rows_ptr + token, mask=valid, other=0)
    offsets = row.to(gl.int64)[None, :] * stride_y + n[:, None]
    gl.store(y_ptr + offsets, y, mask=valid[None, :] & (n < N)[:, None])


@gluon.jit
def _store_or_set_aside(
    gate,
    up,
    y_ptr,
    aside,
    rows_ptr,
    start,
    count,
    n0,
    N,
    stride_y,
    top_k,
    alpha,
    limit,
    HALVES: gl.constexpr,
    ACT: gl.constexpr,
    BN: gl.constexpr,
):
    """Stores y1, rounded, of rows with an adapter, and h of the others; without a gate, up is gate."""
    BT: gl.constexpr = gate.shape[1]
    dtype: gl.constexpr = gate.dtype
    y1_ptr, ids_ptr, adapter_slots = aside
    layout: gl.constexpr = _lines(BN, gl.num_warps())
    gate = gl.convert_layout(gate, layout)
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, BT, layout=gl.SliceLayout(0, layout))
    valid = token < count
    row = gl.load(rows_ptr + token, mask=valid, other=0)
    slot = gl.load(ids_ptr + row // top_k, mask=valid, other=-1)
    adapted = (slot >= 0) & (slot < adapter_slots)
    inside = (n < N)[:, None]
    at = (start + token).to(gl.int64)[None, :]
    y1_ptrs = y1_ptr + at * (HALVES * N) + n[:, None]
    gl.store(y1_ptrs, gate, mask=(valid & adapted)[None, :] & inside)
    if HALVES == 2:
        up = gl.convert_layout(up, layout)
        gl.store(y1_ptrs + N, up, mask=(valid & adapted)[None, :] & inside)
        h = _activate(gate.to(gl.float32), up.to(gl.float32), alpha, limit, ACT)
    else:
        h = _relu2(gate.to(gl.float32))
    rest = valid & ((slot < 0) | (slot >= adapter_slots))
    gl.store(y_ptr + at * stride_y + n[:, None], h.to(dtype), mask=rest[None, :] & inside)


@gluon.jit
def finish(
    acc,
    row0,
    expert,
    split,
    scale0,
    scale1,
    b_ptr,
    y_ptr,
    aside,
    fold,
    b,
    pairs,
    rows_ptr,
    start,
    count,
    N,
    stride_y,
    top_k,
    alpha,
    limit,
    dtype: gl.constexpr,
    HALVES: gl.constexpr,
    ACT: gl.constexpr,
    ASIDE: gl.constexpr,
    FOLD: gl.constexpr,
    BIAS: gl.constexpr,
    FP4: gl.constexpr,
    SCATTER: gl.constexpr,
):
    """Stores the sums of weight rows row0 on, [ROWS, BT]."""
    ROWS: gl.constexpr = acc.shape[0]
    BT: gl.constexpr = acc.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    row = row0 + gl.arange(0, ROWS, layout=rows)
    if FP4 > 0:
        acc = acc * gl.where(row // 8 % 2 == 0, scale0, scale1)[:, None]
    if BIAS:
        output = row // 8 % 2 * N + row // 16 * 8 + row % 8 if HALVES == 2 else row
        inside = (row < HALVES * N) & (split == 0)
        bias = gl.load(b_ptr + expert.to(gl.int64) * (HALVES * N) + output, mask=inside, other=0.0)
        acc = acc + bias[:, None]
    if FOLD:
        acc = fold_row(acc, b, pairs, start, row0, N, fold, dtype, HALVES)
    if HALVES == 2:
        y = acc.to(dtype).to(gl.float32).reshape([ROWS // 16, 2, 8, BT]).permute([0, 2, 3, 1])
        gate, up = gl.split(y)
        n0 = row0 // 2
        if ASIDE or ACT is None:
            gate = gate.reshape([ROWS // 2, BT]).to(dtype)
            up = up.reshape([ROWS // 2, BT]).to(dtype)
        if ASIDE:
            _store_or_set_aside(
                gate, up, y_ptr, aside, rows_ptr, start, count, n0, N, stride_y, top_k, alpha, limit,
                HALVES, ACT, ROWS // 2,
            )  # fmt: skip
        elif ACT is None:
            _store(gate, y_ptr, rows_ptr, start, count, n0, N, stride_y, SCATTER, ROWS // 2)
            _store(up, y_ptr + N, rows_ptr, start, count, n0, N, stride_y, SCATTER, ROWS // 2)
        else:
            h = _activate(gate, up, alpha, limit, ACT).reshape([ROWS // 2, BT]).to(dtype)
            _store(h, y_ptr, rows_ptr, start, count, n0, N, stride_y, SCATTER, ROWS // 2)
    elif ASIDE:
        up = acc.to(dtype)
        _store_or_set_aside(
            up, up, y_ptr, aside, rows_ptr, start, count, row0, N, stride_y, top_k, alpha, limit,
            HALVES, ACT, ROWS,
        )  # fmt: skip
    else:
        if ACT == "relu2":
            acc = _relu2(acc.to(dtype).to(gl.float32))
        _store(acc.to(y_ptr.dtype.element_ty), y_ptr, rows_ptr, start, count, row0, N, stride_y, SCATTER, ROWS)
