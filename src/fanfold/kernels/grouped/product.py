"""The grouped product, one launch for all (token, expert) rows: y = act(x . W[e]^T + bias[e]) (device functions).

Weights are the left operand of the matrix unit and tokens the right one, so that a small batch wastes little. What
differs between formats are the functions that read a tile's codes and zero points, and a few constants.

A program makes BLOCK_N outputs for up to BLOCK_T rows of one expert and sums over K from the first step to the last.
A row's bits so depend on the config, not on the other rows nor on its place in the tile: a program that takes a work
item and one that takes a single row (without a plan) make the same bits.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import triton
import triton.language as tl

from fanfold.kernels.common.activations import activate
from fanfold.kernels.common.floats import e4m3_to_fp16
from fanfold.kernels.common.scales import load_scales, spread


@triton.jit
def groups_of(order, expert, half, k0, K, GROUP: tl.constexpr, RUN: tl.constexpr, BLOCK_K: tl.constexpr):
    """First inputs of the runs of a step, and the scale group of each run; both [BLOCK_K / RUN]."""
    run = k0 + tl.arange(0, BLOCK_K // RUN) * RUN
    if order.ptr is None:
        return run, run // GROUP if GROUP > 0 else tl.zeros_like(run)
    else:
        at = order.ptr + expert * order.stride_e + half * order.stride_p + run
        return run, tl.load(at, mask=run < K, other=0)


@triton.jit
def scales_of(
    s, order, expert, half, n0, N, k0, K,
    SCALES: tl.constexpr, NATIVE_E4M3: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales of a weight tile in fp32, [BLOCK_N, BLOCK_K / RUN]."""
    n = n0 + tl.arange(0, BLOCK_N)
    run, group = groups_of(order, expert, half, k0, K, GROUP, RUN, BLOCK_K)
    matrix = s.ptr + expert * s.stride_e + half * s.stride_p
    return load_scales(matrix, n, n < N, group, run < K, s.rows, s.stride_n, s.stride_g, SCALES, NATIVE_E4M3)


@triton.jit
def weight_tile(
    w, s, z, order, expert, half, n0, N, k0, K,
    CODES: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, SCALE_AT: tl.constexpr,
    BITS: tl.constexpr, V1: tl.constexpr, NATIVE_E4M3: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """W[n0 : n0 + BLOCK_N, k0 : k0 + BLOCK_K] as it enters the product, in the activations' dtype.

    (code - zero) * scale, made in fp32 and rounded once, where scales belong to the weights; else code - zero, which
    is exact.
    """
    matrix = w.ptr + expert * w.stride_e + half * w.stride_p
    tile = CODES(matrix, n0, N, k0, K, w.stride_n, w.stride_k, BITS, NATIVE_E4M3, BLOCK_N, BLOCK_K)
    if ZERO is not None:
        # The code becomes the low bits of fp32 2^23 + code; less 2^23 + zero that is exact.
        tile = (tile | 0x4B000000).to(tl.float32, bitcast=True)
        if ZEROS is None:
            tile -= ZERO + 8388608.0
        else:
            run, group = groups_of(order, expert, half, k0, K, GROUP, RUN, BLOCK_K)
            matrix = z.ptr + expert * z.stride_e + half * z.stride_p
            zero = ZEROS(matrix, n0, N, group, run < K, z.stride_n, z.stride_g, BITS, V1, BLOCK_N)
            tile -= spread(zero.to(tl.float32) + 8388608.0, BLOCK_N, BLOCK_K)
    if SCALE_AT == "weight":
        scale = scales_of(s, order, expert, half, n0, N, k0, K, SCALES, NATIVE_E4M3, GROUP, RUN, BLOCK_N, BLOCK_K)
        tile = tile.to(tl.float32) * spread(scale, BLOCK_N, BLOCK_K)
    return tile.to(DTYPE)


@triton.jit
def weight_tiles(
    w, s, z, order, expert, half, n0, N, k0, K,
    CODES: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, SCALE_AT: tl.constexpr,
    BITS: tl.constexpr, V1: tl.constexpr, NATIVE_E4M3: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    GATED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The tile of this half; GATED: and of the next half, else the same again."""
    tile = weight_tile(
        w, s, z, order, expert, half, n0, N, k0, K,
        CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1, NATIVE_E4M3, GROUP, RUN, BLOCK_N, BLOCK_K, DTYPE,
    )  # fmt: skip
    tile_up = tile
    if GATED:
        tile_up = weight_tile(
            w, s, z, order, expert, half + 1, n0, N, k0, K,
            CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1, NATIVE_E4M3, GROUP, RUN, BLOCK_N, BLOCK_K, DTYPE,
        )  # fmt: skip
    return tile, tile_up


@triton.jit
def add_step(
    acc, tile, x, x_scale, s, order, expert, half, n0, N, k0, K,
    SCALES: tl.constexpr, SCALE_AT: tl.constexpr, NATIVE_E4M3: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    W8A8: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sum: acc [BLOCK_N, BLOCK_T] + tile [BLOCK_N, BLOCK_K] . x [BLOCK_K, BLOCK_T]; "sum" scales the product.

    W8A8 sums each step by itself, since Hopper's products of 8-bit numbers keep fewer bits than fp32 has.
    TURNED: acc is [BLOCK_T, BLOCK_N].
    """
    if W8A8 and SCALE_AT == "sum":
        if WHOLE:
            matrix = s.ptr + expert * s.stride_e + half * s.stride_p
            scale = tl.load(matrix + n0 // s.rows * s.stride_n + k0 // GROUP * s.stride_g).to(tl.float32)
        else:
            scale = scales_of(s, order, expert, half, n0, N, k0, K, SCALES, NATIVE_E4M3, GROUP, RUN, BLOCK_N, BLOCK_K)
        if TURNED:
            scale = x_scale[:, None] * (scale if WHOLE else tl.trans(scale))
            return acc + tl.dot(tl.trans(x), tl.trans(tile)) * scale
        else:
            return acc + tl.dot(tile, x) * (x_scale[None, :] * scale)
    elif SCALE_AT == "sum":
        scale = scales_of(s, order, expert, half, n0, N, k0, K, SCALES, NATIVE_E4M3, GROUP, RUN, BLOCK_N, BLOCK_K)
        return acc + tl.dot(tile, x, input_precision="ieee") * scale
    elif TURNED:
        return acc + tl.dot(tl.trans(x), tl.trans(tile))
    elif W8A8:
        return acc + tl.dot(tile, x)
    else:
        return tl.dot(tile, x, acc, input_precision="ieee")


@triton.jit
def sums(
    x_rows, in_t, source, xs, w, s, z, order, expert, half, n0, N, K,
    CODES: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, SCALE_AT: tl.constexpr,
    BITS: tl.constexpr, V1: tl.constexpr, NATIVE_E4M3: tl.constexpr, GROUP: tl.constexpr, RUN: tl.constexpr,
    GATED: tl.constexpr, W8A8: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over all inputs, fp32 [BLOCK_N, BLOCK_T]: of this half; GATED: and of the next, else the same again.

    x_rows: pointers [1, BLOCK_T] to rows of x; source: their numbers. in_t: which of them there are.
    """
    # Scales of tokens are few values a thread where tokens are the left operand, which has 64 rows or more.
    TURNED: tl.constexpr = W8A8 and BLOCK_T >= 64
    DECODE: tl.constexpr = W8A8 and not NATIVE_E4M3
    operand: tl.constexpr = tl.float16 if DECODE else x_rows.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_T, BLOCK_N) if TURNED else (BLOCK_N, BLOCK_T), tl.float32)
    acc_up = acc
    if AHEAD:
        tile, tile_up = weight_tiles(
            w, s, z, order, expert, half, n0, N, 0, K,
            CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1, NATIVE_E4M3, GROUP, RUN, GATED, BLOCK_N, BLOCK_K, operand,
        )  # fmt: skip
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_rows + (k0 + k)[:, None], mask=in_t[None, :] & (k0 + k < K)[:, None], other=0.0)
        if DECODE:
            x = e4m3_to_fp16(x, False)
        if not AHEAD:
            tile, tile_up = weight_tiles(
                w, s, z, order, expert, half, n0, N, k0, K, CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1,
                NATIVE_E4M3, GROUP, RUN, GATED, BLOCK_N, BLOCK_K, operand,
            )  # fmt: skip
        x_scale = None
        if W8A8 and SCALE_AT == "sum":
            at = source * xs.stride_t + k0 // GROUP * xs.stride_g  # 32 bits: x would have 2^36 numbers
            x_scale = tl.load(xs.ptr + at, mask=in_t, other=0.0)
        acc = add_step(
            acc, tile, x, x_scale, s, order, expert, half, n0, N, k0, K,
            SCALES, SCALE_AT, NATIVE_E4M3, GROUP, RUN, W8A8, TURNED, WHOLE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if GATED:
            acc_up = add_step(
                acc_up, tile_up, x, x_scale, s, order, expert, half + 1, n0, N, k0, K,
                SCALES, SCALE_AT, NATIVE_E4M3, GROUP, RUN, W8A8, TURNED, WHOLE, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if AHEAD:
            tile, tile_up = weight_tiles(
                w, s, z, order, expert, half, n0, N, k0 + BLOCK_K, K, CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1,
                NATIVE_E4M3, GROUP, RUN, GATED, BLOCK_N, BLOCK_K, operand,
            )  # fmt: skip
    if TURNED:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    return acc, acc_up


@triton.jit
def finish(
    acc, x_scale, s, m_ptr, b_ptr, expert, half, n0, N,
    HALVES: tl.constexpr, SCALES: tl.constexpr, SCALE_AT: tl.constexpr, DIVIDE: tl.constexpr,
    NATIVE_E4M3: tl.constexpr, W8A8: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The rounded sums [BLOCK_N, BLOCK_T]: what all inputs of an output share comes last, in fp32."""
    n = n0 + tl.arange(0, BLOCK_N)
    if SCALE_AT == "end":
        only = tl.zeros((1,), tl.int32)
        matrix = s.ptr + expert * s.stride_e + half * s.stride_p
        scale = load_scales(matrix, n, n < N, only, only == 0, s.rows, s.stride_n, s.stride_g, SCALES, NATIVE_E4M3)
        if W8A8:
            scale = scale * x_scale[None, :]
        acc *= scale
    if m_ptr is not None:
        scale = tl.load(m_ptr + expert * HALVES + half)
        if DIVIDE:
            acc = tl.div_rn(acc, tl.full(acc.shape, 1.0, tl.float32) * scale)
        else:
            acc *= scale
    if b_ptr is not None:
        bias = tl.load(b_ptr + (expert * HALVES + half) * N + n, mask=n < N, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    return acc.to(DTYPE)


@triton.jit
def set_aside(aside, gate, up, rows_ptr, first, t, in_t, column, N, PLANNED: tl.constexpr, HALVES: tl.constexpr):
    """Stores y1 of the rows that have an adapter; the mask of the others."""
    row = first + t
    if PLANNED:  # read once more: kept from before the sums they would take registers all through them
        row = tl.load(rows_ptr + row, mask=in_t)
    slot = tl.load(aside.adapter_ids + row // aside.top_k, mask=in_t, other=-1)
    adapted = (slot >= 0) & (slot < aside.slots)
    if tl.max(adapted.to(tl.int32), 0) > 0:
        to = aside.y1 + first.to(tl.int64) * (HALVES * N) + t.to(tl.int64)[None, :] * (HALVES * N) + column[:, None]
        mask = adapted[None, :] & (column < N)[:, None]
        tl.store(to, gate, mask=mask)
        if HALVES == 2:
            tl.store(to + N, up, mask=mask)
    return in_t & (slot < 0) | in_t & (slot >= aside.slots)


@triton.jit
def rows_of_expert(
    x_ptr, xs, y_ptr, aside, w, s, z, order, m_ptr, b_ptr, rows_ptr, rw_ptr, expert, half, n0, first, count, N, K,
    top_k, alpha, limit, stride_x, stride_y,
    CODES: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, SCALE_AT: tl.constexpr,
    BITS: tl.constexpr, V1: tl.constexpr, DIVIDE: tl.constexpr, NATIVE_E4M3: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, HALVES: tl.constexpr, ACTIVATION: tl.constexpr, PLANNED: tl.constexpr, GATHER: tl.constexpr,
    SCATTER: tl.constexpr, W8A8: tl.constexpr, WHOLE: tl.constexpr, APART: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Outputs n0 to n0 + BLOCK_N of `count` <= BLOCK_T rows of one expert; arguments as for `grouped_product`."""
    GATED: tl.constexpr = ACTIVATION is not None and HALVES == 2
    if W8A8 and NATIVE_E4M3:
        x_ptr = x_ptr.to(tl.pointer_type(tl.float8e4nv))
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    t = tl.arange(0, BLOCK_T)
    in_t = t < count
    position = first + t
    row = position
    if PLANNED and (GATHER or SCATTER or rw_ptr is not None):
        row = tl.load(rows_ptr + position, mask=in_t, other=0)
    source = row // top_k if GATHER else position
    x_rows = x_ptr + source.to(tl.int64)[None, :] * stride_x
    acc, acc_up = sums(
        x_rows, in_t, source, xs, w, s, z, order, expert, half, n0, N, K, CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS,
        V1, NATIVE_E4M3, GROUP, RUN, GATED and not APART, W8A8, WHOLE, BLOCK_N, BLOCK_K, BLOCK_T, AHEAD, STAGES,
    )  # fmt: skip
    x_scale = None
    if W8A8 and SCALE_AT == "end":
        x_scale = tl.load(xs.ptr + source * xs.stride_t, mask=in_t, other=0.0)
    y = finish(
        acc, x_scale, s, m_ptr, b_ptr, expert, half, n0, N,
        HALVES, SCALES, SCALE_AT, DIVIDE, NATIVE_E4M3, W8A8, BLOCK_N, dtype,
    )  # fmt: skip
    column = n0 + tl.arange(0, BLOCK_N)
    up = y
    if GATED:
        if APART:
            acc_up, _ = sums(
                x_rows, in_t, source, xs, w, s, z, order, expert, half + 1, n0, N, K, CODES, ZEROS, ZERO, SCALES,
                SCALE_AT, BITS, V1, NATIVE_E4M3, GROUP, RUN, False, W8A8, WHOLE, BLOCK_N, BLOCK_K, BLOCK_T, AHEAD,
                STAGES,
            )  # fmt: skip
        up = finish(
            acc_up, x_scale, s, m_ptr, b_ptr, expert, half + 1, n0, N,
            HALVES, SCALES, SCALE_AT, DIVIDE, NATIVE_E4M3, W8A8, BLOCK_N, dtype,
        )  # fmt: skip
    if aside is not None:
        in_t = set_aside(aside, y, up, rows_ptr, first, t, in_t, column, N, PLANNED, HALVES)
    if GATED:
        y = activate(y, up, alpha, limit, ACTIVATION).to(dtype)
    elif ACTIVATION is not None:
        y = activate(y, y, alpha, limit, ACTIVATION).to(dtype)
    if rw_ptr is not None:
        weight = tl.load(rw_ptr + row, mask=in_t, other=0.0)
        y = (y.to(tl.float32) * weight[None, :]).to(dtype)
    if SCATTER:
        y_rows = y_ptr + row.to(tl.int64) * stride_y
    else:  # not by positions, which would take registers all through the sums
        y_rows = y_ptr + first.to(tl.int64) * stride_y + t.to(tl.int64) * stride_y
    y_rows += half * N
    tl.store(y_rows[None, :] + column[:, None], y, mask=in_t[None, :] & (column < N)[:, None])


@triton.jit(do_not_specialize=["slots", "experts", "top_k", "alpha", "limit"])
def grouped_product(
    x_ptr: tl.tensor, xs: tl.tuple, y_ptr: tl.tensor, aside: tl.tuple | None, w: tl.tuple, s: tl.tuple, z: tl.tuple,
    order: tl.tuple, m_ptr: tl.tensor, b_ptr: tl.tensor, work_ptr: tl.tensor, rows_ptr: tl.tensor, rw_ptr: tl.tensor,
    slots: tl.tensor, experts: tl.tensor, N: tl.tensor, K: tl.tensor, top_k: tl.tensor, alpha: tl.tensor,
    limit: tl.tensor, stride_x: tl.tensor, stride_y: tl.tensor,
    CODES: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, SCALE_AT: tl.constexpr,
    BITS: tl.constexpr, V1: tl.constexpr, DIVIDE: tl.constexpr, NATIVE_E4M3: tl.constexpr, GROUP: tl.constexpr,
    RUN: tl.constexpr, HALVES: tl.constexpr, ACTIVATION: tl.constexpr, PLANNED: tl.constexpr, GATHER: tl.constexpr,
    SCATTER: tl.constexpr, W8A8: tl.constexpr, WHOLE: tl.constexpr, APART: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr, SMALLEST_T: tl.constexpr, TOGETHER: tl.constexpr,
    AHEAD: tl.constexpr, STAGES: tl.constexpr,
) -> None:  # fmt: skip
    """One program makes BLOCK_N outputs of a half (or of h) for the rows of one work item, or for one row.

    Operands and constants:
        x_ptr: [T, K] with GATHER (row of x = token of the position), else [R, K] at sorted positions; bytes for W8A8.
        xs: `common.operands` RowScales, of W8A8.
        y_ptr: [R, HALVES * N], [R, N] behind an activation; at sorted positions, with SCATTER at rows.
        aside: `spec.adapters` Aside, behind gate_up with an ACTIVATION; or None.
        w, s, z, order: `common.operands` Codes, Scales, Zeros, Order.
        m_ptr: fp32 [E, P], one scale a matrix, or None; it divides with DIVIDE. b_ptr: bias [E, P, N] or None.
        work_ptr: PLANNED: int32 [slots, 4]: expert (-1: nothing to do), first sorted position, rows, 0. Else the expert
            of each row, [slots]; sorted positions are rows then, and experts < 0 or >= `experts` are skipped.
        rows_ptr: int32 [R], sorted position -> row; None without a plan.
        rw_ptr: fp32 [R] by row, multiplies the rounded output, or None.
        slots: work items, or rows. N: outputs of one half. K: inputs. top_k: rows a token.
        alpha, limit: constants of clamped_swiglu. stride_x, stride_y: elements from row to row.
        CODES, ZEROS: functions of `common.codes` and `common.scales`; ZEROS is None where all zero points are ZERO,
            ZERO is None where codes are numbers. SCALES: kind of scale (`load_scales`) or None.
        SCALE_AT: None; "weight"; "sum", the fp32 sum of a step (which lies in one group); "end", where K is one group.
        GROUP: inputs of a group, of weights and of activations in 8 bits; 0 where K is one group. It divides inputs in
            every step, so it is a constant.
        RUN: consecutive inputs that certainly share a group; a power of two that divides BLOCK_K.
        ACTIVATION: None, or what makes h from gate and up (relu2: from up) in the same program. y1 is rounded
            before it, so that the bits are those of two launches.
        W8A8: x and weights are E4M3, of a machine that multiplies them (NATIVE_E4M3), else read as fp16.
        WHOLE: one weight scale for all BLOCK_N outputs and a step (W8A8).
        APART: gate and up are summed one after the other, in two passes over K; the same bits with fewer registers.
        SMALLEST_T: programs with fewer rows make tiles of half or a quarter of BLOCK_T, down to this.
        AHEAD: weights are unpacked one step ahead, and so while the product of this step is made; False where they
            enter it as they lie in memory. It also makes Triton give them to the product through shared memory: as
            a register operand, Triton 3.6 may overwrite them while a product on Hopper still reads them.
        TOGETHER: work items that pass one weight tile one after the other, while it is in the L2 cache.
    """
    GATED: tl.constexpr = ACTIVATION is not None and HALVES == 2
    tiles_of_half = tl.cdiv(N, BLOCK_N)
    tiles = tiles_of_half if GATED else tiles_of_half * HALVES
    pid = tl.program_id(0)
    bundle = pid // (TOGETHER * tiles)
    inside = pid % (TOGETHER * tiles)
    size = tl.minimum(slots - bundle * TOGETHER, TOGETHER)
    slot = bundle * TOGETHER + inside % size
    place = inside // size
    if GATED or HALVES == 1:  # known to the compiler, 0 takes no registers
        half = tl.full((), 0, tl.int64)
        n0 = place * BLOCK_N
    else:
        half = (place // tiles_of_half).to(tl.int64)
        n0 = (place % tiles_of_half) * BLOCK_N
    if PLANNED:
        expert = tl.load(work_ptr + slot * 4).to(tl.int64)
        if expert < 0:
            return
        first = tl.load(work_ptr + slot * 4 + 1)
        count = tl.load(work_ptr + slot * 4 + 2)
    else:
        expert = tl.load(work_ptr + slot).to(tl.int64)
        if (expert < 0) | (expert >= experts):
            return
        first = slot
        count = 1

    # Fewer rows, a smaller tile: at most a quarter of BLOCK_T.
    if SMALLEST_T < BLOCK_T and count <= BLOCK_T // 2:
        if SMALLEST_T < BLOCK_T // 2 and count <= BLOCK_T // 4:
            rows_of_expert(
                x_ptr, xs, y_ptr, aside, w, s, z, order, m_ptr, b_ptr, rows_ptr, rw_ptr, expert, half, n0, first, count,
                N, K, top_k, alpha, limit, stride_x, stride_y, CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1, DIVIDE,
                NATIVE_E4M3, GROUP, RUN, HALVES, ACTIVATION, PLANNED, GATHER, SCATTER, W8A8, WHOLE, APART, BLOCK_N,
                BLOCK_K, BLOCK_T // 4, AHEAD, STAGES,
            )  # fmt: skip
        else:
            rows_of_expert(
                x_ptr, xs, y_ptr, aside, w, s, z, order, m_ptr, b_ptr, rows_ptr, rw_ptr, expert, half, n0, first, count,
                N, K, top_k, alpha, limit, stride_x, stride_y, CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1, DIVIDE,
                NATIVE_E4M3, GROUP, RUN, HALVES, ACTIVATION, PLANNED, GATHER, SCATTER, W8A8, WHOLE, APART, BLOCK_N,
                BLOCK_K, BLOCK_T // 2, AHEAD, STAGES,
            )  # fmt: skip
    else:
        rows_of_expert(
            x_ptr, xs, y_ptr, aside, w, s, z, order, m_ptr, b_ptr, rows_ptr, rw_ptr, expert, half, n0, first, count,
            N, K, top_k, alpha, limit, stride_x, stride_y, CODES, ZEROS, ZERO, SCALES, SCALE_AT, BITS, V1, DIVIDE,
            NATIVE_E4M3, GROUP, RUN, HALVES, ACTIVATION, PLANNED, GATHER, SCATTER, W8A8, WHOLE, APART, BLOCK_N,
            BLOCK_K, BLOCK_T, AHEAD, STAGES,
        )  # fmt: skip
