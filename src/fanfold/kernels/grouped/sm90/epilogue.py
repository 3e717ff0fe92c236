"""What follows the product of one work item (Gluon): scale of the matrix, bias, rounding, activation, store."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
def _adapted(token, rows_ptr, ids_ptr, start, count, top_k, adapter_slots, DIRECT: gl.constexpr):
    """Which tokens of a work item have an adapter."""
    row = start + token
    if not DIRECT:
        row = gl.load(rows_ptr + token, mask=token < count, other=0)
    slot = gl.load(ids_ptr + row // top_k, mask=token < count, other=-1)
    return (slot >= 0) & (slot < adapter_slots)


@gluon.jit
def _store(
    y,
    y_ptr,
    rows_ptr,
    ids_ptr,
    start,
    count,
    n0,
    N,
    stride_y,
    top_k,
    adapter_slots,
    SCATTER: gl.constexpr,
    BN: gl.constexpr,
    DIRECT: gl.constexpr,
    ADAPTED: gl.constexpr,
):
    """Stores y [BN, BT] as BT rows of the outputs n0 on that lie below N. ADAPTED: with an adapter, or without."""
    BT: gl.constexpr = y.shape[1]
    if y.dtype == gl.float32:
        layout: gl.constexpr = y.type.layout  # 8 lanes hold 8 neighbours: whole sectors as they are
    else:
        TN: gl.constexpr = BN // 8 if BN < 256 else 32
        layout: gl.constexpr = gl.BlockedLayout([8, 1], [TN, 32 // TN], [1, gl.num_warps()], [0, 1])
        y = gl.convert_layout(y, layout)
    n = n0 + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    token = gl.arange(0, BT, layout=gl.SliceLayout(0, layout))
    valid = token < count
    if ADAPTED is not None:
        valid &= _adapted(token, rows_ptr, ids_ptr, start, count, top_k, adapter_slots, DIRECT) == ADAPTED
    row = start + token
    if SCATTER:
        row = gl.load(rows_ptr + token, mask=valid, other=0)
    offsets = row.to(gl.int64)[None, :] * stride_y + n[:, None]
    gl.store(y_ptr + offsets, y, mask=valid[None, :] & (n < N)[:, None])


@gluon.jit
def _store_halves(
    gate,
    up,
    y_ptr,
    rows_ptr,
    ids_ptr,
    start,
    count,
    n0,
    N,
    stride_y,
    top_k,
    adapter_slots,
    dtype: gl.constexpr,
    SCATTER: gl.constexpr,
    BN: gl.constexpr,
    BT: gl.constexpr,
    DIRECT: gl.constexpr,
    ADAPTED: gl.constexpr,
):
    """Stores y1, gate first."""
    gate = gate.reshape([BN, BT]).to(dtype)
    up = up.reshape([BN, BT]).to(dtype)
    _store(
        gate, y_ptr, rows_ptr, ids_ptr, start, count, n0, N, stride_y, top_k, adapter_slots,
        SCATTER, BN, DIRECT, ADAPTED,
    )  # fmt: skip
    _store(
        up, y_ptr + N, rows_ptr, ids_ptr, start, count, n0, N, stride_y, top_k, adapter_slots,
        SCATTER, BN, DIRECT, ADAPTED,
    )  # fmt: skip


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
    y1_ptr,
    ids_ptr,
    rows_ptr,
    start,
    count,
    N,
    stride_y,
    top_k,
    adapter_slots,
    alpha,
    limit,
    dtype: gl.constexpr,
    HALVES: gl.constexpr,
    ACT: gl.constexpr,
    ASIDE: gl.constexpr,
    BIAS: gl.constexpr,
    DIRECT: gl.constexpr,
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
    REST: gl.constexpr = False if ASIDE else None
    adapted = False
    if ASIDE:
        token = gl.arange(0, BT, layout=gl.SliceLayout(0, acc.type.layout))
        having = _adapted(token, rows_ptr, ids_ptr, start, count, top_k, adapter_slots, DIRECT)
        adapted = gl.max(having.to(gl.int32), 0) > 0
    if HALVES == 2:
        y = acc.to(dtype).to(gl.float32).reshape([ROWS // 16, 2, 8, BT]).permute([0, 2, 3, 1])
        gate, up = gl.split(y)
        n0 = row0 // 2
        if ACT is None:
            _store_halves(
                gate, up, y_ptr, rows_ptr, ids_ptr, start, count, n0, N, stride_y, top_k, adapter_slots,
                dtype, SCATTER, ROWS // 2, BT, DIRECT, None,
            )  # fmt: skip
        if ASIDE and adapted:
            _store_halves(
                gate, up, y1_ptr, rows_ptr, ids_ptr, start, count, n0, N, 2 * N, top_k, adapter_slots,
                dtype, SCATTER, ROWS // 2, BT, DIRECT, True,
            )  # fmt: skip
        if ACT is not None:
            h = _activate(gate, up, alpha, limit, ACT).reshape([ROWS // 2, BT]).to(dtype)
            _store(
                h, y_ptr, rows_ptr, ids_ptr, start, count, n0, N, stride_y, top_k, adapter_slots,
                SCATTER, ROWS // 2, DIRECT, REST,
            )  # fmt: skip
    else:
        if ASIDE and adapted:
            _store(
                acc.to(dtype), y1_ptr, rows_ptr, ids_ptr, start, count, row0, N, N, top_k, adapter_slots,
                SCATTER, ROWS, DIRECT, True,
            )  # fmt: skip
        if ACT == "relu2":
            acc = gl.maximum(acc.to(dtype).to(gl.float32), 0.0, propagate_nan=tl.PropagateNan.ALL)
            acc = acc * acc
        _store(
            acc.to(y_ptr.dtype.element_ty), y_ptr, rows_ptr, ids_ptr, start, count, row0, N, stride_y, top_k,
            adapter_slots, SCATTER, ROWS, DIRECT, REST,
        )  # fmt: skip
