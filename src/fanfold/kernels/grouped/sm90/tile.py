"""The product of one work item with a tile of its tokens (Gluon): weights are the register operand of wgmma.

Weights come in fragment order (`fragments`): 16 bytes a thread are the thread's part of a 64 x 64 tile, so they go from
device memory to registers, one stage of KX columns ahead, and unpacking never moves data between threads. Activations
reach shared memory by cp.async.

The group scale is applied to the fp32 sum of a group (POST, few rows: integer weights are exact), or to the weights:
w = act(fp32(q - zero) * fp32(scale)), correctly rounded (`unpack`).

The register operand of a wgmma must not be overwritten while the product is in flight, and Triton 3.6 does not see to
that: each wait names the fragments that were in flight. Tests walk the machine code of every tuned config for it.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fanfold.kernels.grouped.sm90.epilogue import finish
from fanfold.kernels.grouped.sm90.fold import find_pairs, load_b
from fanfold.kernels.grouped.sm90.stage import load_groups, load_scales, load_stage
from fanfold.kernels.grouped.sm90.unpack import minus, unit, unpack, weights_int4, zero
from fanfold.kernels.grouped.sm90.unpack_fp4 import by_group, weights_fp4


@gluon.constexpr_function
def _threads(tokens, inputs):
    """Threads that copy a row, 16 bytes each at a time.

    With many rows eight, 128 bytes, the least without bank conflicts: a thread's other copies of the row follow at
    fixed distances, so that it holds few pointers. Else whole rows.
    """
    return 8 if tokens >= 64 else min(32, inputs // 8)


@gluon.jit
def _source(
    x_ptr,
    rows_ptr,
    start,
    count,
    stride_x,
    top_k,
    dtype: gl.constexpr,
    TOKENS: gl.constexpr,
    KX: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    GATHER: gl.constexpr,
    DIRECT: gl.constexpr,
):
    """Shared memory for stages of TOKENS rows of x, and where they come from: pointers, which exist, inputs."""
    THREADS: gl.constexpr = _threads(TOKENS, KX)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, KX], dtype)
    smem = gl.allocate_shared_memory(dtype, [STAGES, TOKENS, KX], shared)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    valid = token < count
    row = start + token
    if GATHER:
        if not DIRECT:
            row = gl.load(rows_ptr + token, mask=valid, other=0)
        row = row // top_k
    k = gl.arange(0, KX, layout=gl.SliceLayout(0, layout))
    return smem, x_ptr + row.to(gl.int64) * stride_x, valid, k


@gluon.jit
def _fill(x, stage, step, left, KX: gl.constexpr, PAD_K: gl.constexpr):
    """Asks for a stage of a step's inputs; x: of `_source`, one or two; left: inputs that there are."""
    for i in gl.static_range(len(x)):
        smem, ptrs, valid, k = x[i]
        if PAD_K:
            mask = valid[:, None] & (k < left - step * KX)[None, :]
        else:
            mask = gl.broadcast(valid[:, None], k[None, :])[0]
        ptrs = (ptrs + step * KX)[:, None] + k[None, :]
        async_copy.async_copy_global_to_shared(smem.index(stage), ptrs, mask=mask)
    async_copy.commit_group()


@gluon.constexpr_function
def _layout(warps, tokens):
    """Of sums [weight rows, tokens]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, tokens, 16])


@gluon.jit
def _multiply(acc, w, x, FRESH: gl.constexpr):
    """acc, or nothing where FRESH, and w . x, in flight."""
    parent: gl.constexpr = _layout(gl.num_warps(), x.shape[0])
    w = gl.convert_layout(w, gl.DotOperandLayout(operand_index=0, parent=parent, k_width=2), assert_trivial=True)
    return warpgroup_mma(w, x.permute((1, 0)), acc, use_acc=not FRESH, is_async=True)


@gluon.jit
def _add(acc, w, x, stage, k: gl.constexpr, slab: gl.constexpr, FRESH: gl.constexpr):
    """`_multiply` of one slab's fragment with inputs k to k + 64 of a stage."""
    found = ()
    for i in gl.static_range(len(acc)):
        if i // len(x) == slab:
            found = found + (_multiply(acc[i], w, x[i % len(x)][0].index(stage).slice(k, 64, dim=1), FRESH),)
        else:
            found = found + (acc[i],)
    return found


@gluon.jit
def _scaled(acc, of_group, s):
    """acc + of_group * s, a scale a row."""
    s = gl.convert_layout(s, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return acc + of_group * s.to(gl.float32)[:, None]


@gluon.jit
def run_tile(
    args,
    K: gl.constexpr,
    G: gl.constexpr,
    BT: gl.constexpr,
    MORE: gl.constexpr,
    WGS: gl.constexpr,
    SLABS: gl.constexpr,
    KX: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    POST: gl.constexpr,
    STREAM: gl.constexpr,
    GATE_UP: gl.constexpr,
    GATHER: gl.constexpr,
    HALVES: gl.constexpr,
    ACT: gl.constexpr,
    ASIDE: gl.constexpr,
    FOLD: gl.constexpr,
    BIAS: gl.constexpr,
    DIRECT: gl.constexpr,
    ZEROS: gl.constexpr,
    SHORT: gl.constexpr,
    FP4: gl.constexpr,
    PAD_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """The product of one work item with a tile of BT tokens, and MORE behind them.

    args: those of `product.grouped_int4_sm90` that are no constants; pointers stand at the program's weights.
    """
    (
        x_ptr, w_ptrs, s_ptrs, z_ptrs, b_ptr, y_ptr, aside, fold, rows_ptr, expert, start, count, tile, split, scale0,
        scale1, N, stride_x, stride_y, top_k, alpha, limit,
    ) = args  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    WARPS: gl.constexpr = 4 * WGS
    ROWS: gl.constexpr = 64 * WGS
    BM: gl.constexpr = ROWS * SLABS
    TILES: gl.constexpr = KX // 64
    STEPS: gl.constexpr = K // SPLIT // KX
    PARTS: gl.constexpr = 1 if MORE == 0 else 2
    UNIT: gl.constexpr = 1.0 if POST or FP4 > 0 else unit(dtype)
    AHEAD: gl.constexpr = (
        STAGES - 1 if POST else STAGES - 2
    )  # without POST a product of the step before may be in flight
    # The fragments of a turn must be even in number: two take turns, and each is named by the wait before its reuse.
    UNROLL: gl.constexpr = 1 if POST or TILES * SLABS % 2 == 0 else 2
    WSLAB: gl.constexpr = WGS * (K // 64) * 512  # words from slab 0 to slab 1
    mma: gl.constexpr = _layout(WARPS, BT)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    in_operand: gl.constexpr = gl.SliceLayout(1, operand)
    rows: gl.constexpr = gl.SliceLayout(1, mma) if POST else in_operand
    if FP4 == 0:
        SSLAB: gl.constexpr = WGS * (K // G) * 64  # scales from slab 0 to slab 1
        in_slab = gl.arange(0, ROWS, layout=rows)
        s_offsets = in_slab // 64 * (K // G * 64) + in_slab % 64
        s_ptrs += s_offsets
        z_ptrs += s_offsets
    else:
        SSLAB: gl.constexpr = WGS * K
        in_slab = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(2, by_group(WGS, FP4))))
        s_ptrs = s_ptrs + (in_slab // 64 * K + in_slab % 64)

    # weights do not depend on the kernel before
    q = load_stage(w_ptrs, 0, WSLAB, SLABS, TILES, STREAM)
    s = load_scales(s_ptrs, 0, SSLAB, SLABS, KX, G, FP4)
    if ZEROS:
        z = load_groups(z_ptrs, 0, SSLAB, SLABS, KX, G)
    else:
        z = ()
    if PDL and not (GATE_UP or FOLD):
        gdc_wait()
    if PDL or ASIDE:  # the order of the fold's rows is made beside the last programs
        gdc_launch_dependents()

    x_ptr += split * (K // SPLIT)
    left = stride_x - split * (K // SPLIT)  # inputs that x has from here on; behind them shared memory gets zeros
    x = (_source(x_ptr, rows_ptr, start, count, stride_x, top_k, dtype, BT, KX, STAGES, WARPS, GATHER, DIRECT),)
    if MORE > 0:
        x = x + (
            _source(
                x_ptr, rows_ptr + BT, start + BT, count - BT, stride_x, top_k,
                dtype, MORE, KX, STAGES, WARPS, GATHER, DIRECT,
            ),
        )  # fmt: skip
    for first in gl.static_range(AHEAD):
        if first < STEPS:
            _fill(x, first, first, left, KX, PAD_K)
        else:
            async_copy.commit_group()

    pairs = ()
    b0 = ()
    b1 = ()
    if FOLD:
        pairs = find_pairs(fold, start, expert, HALVES)
        b0 = load_b(pairs, tile * BM, N, 0, ROWS, HALVES, dtype)
        if SLABS == 2:
            b1 = load_b(pairs, tile * BM + ROWS, N, 0, ROWS, HALVES, dtype)
    acc = ()
    for _ in gl.static_range(SLABS):
        acc = acc + (gl.zeros([ROWS, BT], gl.float32, layout=mma),)
        if MORE > 0:
            acc = acc + (gl.zeros([ROWS, MORE], gl.float32, layout=_layout(WARPS, MORE)),)
    last = gl.zeros([ROWS, 64], dtype, layout=operand)  # the fragment that may be in flight
    at = 0  # stage of x in use
    to = AHEAD  # stage of x to fill
    for turn in range(0, STEPS, UNROLL):
        for u in gl.static_range(UNROLL):
            t = turn + u
            async_copy.wait_group(AHEAD - 1)
            fence_async_shared()
            if t + AHEAD < STEPS:
                _fill(x, to, t + AHEAD, left, KX, PAD_K)
            else:
                async_copy.commit_group()
            after = gl.minimum(t + 1, STEPS - 1)
            q_next = load_stage(w_ptrs, after, WSLAB, SLABS, TILES, STREAM)
            s_next = load_scales(s_ptrs, after, SSLAB, SLABS, KX, G, FP4)
            if ZEROS:
                z_next = load_groups(z_ptrs, after, SSLAB, SLABS, KX, G)
            else:
                z_next = z
            if POST:
                GROUPS: gl.constexpr = KX // G
                for g in gl.static_range(GROUPS):
                    sums = acc
                    held = ()
                    for j in gl.static_range(G // 64):
                        for i in gl.static_range(SLABS):
                            z0 = zero(z, i * GROUPS + g, ROWS, ZEROS, rows, dtype)
                            z0 = gl.convert_layout(z0, in_operand, assert_trivial=True)
                            w = minus(unpack(q[i * TILES + g * (G // 64) + j], operand, WGS, dtype), z0[:, None])
                            sums = _add(sums, w, x, at, g * G + j * 64, i, j == 0)
                            held = held + (w,)
                    sums = warpgroup_mma_wait(0, deps=sums + held)
                    added = ()
                    for i in gl.static_range(SLABS * PARTS):
                        added = added + (_scaled(acc[i], sums[i], s[i // PARTS * GROUPS + g]),)
                    acc = added
            else:
                for j in gl.static_range(TILES):
                    for i in gl.static_range(SLABS):
                        if FP4 > 0:
                            w = weights_fp4(q[i * TILES + j], s[i * TILES + j], FP4, WGS, operand)
                        else:
                            w = weights_int4(q[i * TILES + j], s, z, i, j, KX, G, WGS, ZEROS, SHORT, operand, dtype)
                        acc = _add(acc, w, x, at, j * 64, i, False)
                        done = warpgroup_mma_wait(PARTS, deps=acc + (last,))
                        acc = done[0 : SLABS * PARTS]
                        last = w
            at = gl.where(at == STAGES - 1, 0, at + 1)
            to = gl.where(to == STAGES - 1, 0, to + 1)
            q = q_next
            s = s_next
            z = z_next
    if not POST:
        acc = warpgroup_mma_wait(0, deps=acc + (last,))
    async_copy.wait_group(0)

    if PDL and FOLD:  # for xa, which the kernel before makes while this one sums
        gdc_wait()
    for i in gl.static_range(SLABS):
        for part in gl.static_range(PARTS):
            finish(
                acc[i * PARTS + part] * UNIT, tile * BM + i * ROWS, expert, split, scale0, scale1, b_ptr, y_ptr,
                aside, fold, b0 if i == 0 else b1, pairs, rows_ptr + part * BT, start + part * BT, count - part * BT,
                N, stride_y, top_k, alpha, limit,
                dtype, HALVES, ACT, ASIDE, FOLD, BIAS, FP4, not (GATE_UP or DIRECT),
            )  # fmt: skip
