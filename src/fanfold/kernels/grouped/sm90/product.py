"""The grouped product with 4-bit weights on Hopper (Gluon): weights are the register operand of wgmma.

One program makes `64 * WGS * SLABS` weight rows for up to BT token rows of one expert. Weights come in fragment order
(`fragments`): 16 bytes a thread are the thread's part of a 64 x 64 tile, so they go from device memory to registers,
one stage of KX columns ahead, and unpacking never moves data between threads. Activations reach shared memory by
cp.async.

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
from fanfold.kernels.grouped.sm90.unpack import (
    by_group,
    load_groups,
    load_scales,
    load_stage,
    minus,
    unpack,
    weights,
    zero,
)


@gluon.jit
def _inside(valid, k, left, PAD_K: gl.constexpr):
    """Which of [tokens, inputs] are copied."""
    if PAD_K:
        return valid[:, None] & (k < left)[None, :]
    else:
        return gl.broadcast(valid[:, None], (k >= 0)[None, :])[0]


@gluon.jit
def _run(
    args,
    K: gl.constexpr,
    G: gl.constexpr,
    BT: gl.constexpr,
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
    FP4: gl.constexpr,
    PAD_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """The product of one work item with a tile of BT tokens; pointers stand at the program's weights."""
    (
        x_ptr, w_ptrs, s_ptrs, z_ptrs, b_ptr, y_ptr, aside, fold, rows_ptr, expert, start, count, tile, split, scale0,
        scale1, N, stride_x, stride_y, top_k, alpha, limit,
    ) = args  # fmt: skip
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    ROWS: gl.constexpr = 64 * WGS
    BM: gl.constexpr = ROWS * SLABS
    TILES: gl.constexpr = KX // 64
    STEPS: gl.constexpr = K // SPLIT // KX
    AHEAD: gl.constexpr = (
        STAGES - 1 if POST else STAGES - 2
    )  # without POST a product of the step before may be in flight
    # The fragments of a turn must be even in number: two take turns, and each is named by the wait before its reuse.
    UNROLL: gl.constexpr = 1 if POST or TILES * SLABS % 2 == 0 else 2
    WSLAB: gl.constexpr = WGS * (K // 64) * 512  # words from slab 0 to slab 1
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4 * WGS, 1], instr_shape=[16, BT, 16])
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
    qa = load_stage(w_ptrs, 0, 0, WSLAB, TILES, STREAM)
    if SLABS == 2:
        qb = load_stage(w_ptrs, 0, 1, WSLAB, TILES, STREAM)
    else:
        qb = ()
    s = load_scales(s_ptrs, 0, SSLAB, SLABS, KX, G, FP4)
    if ZEROS:
        z = load_groups(z_ptrs, 0, SSLAB, SLABS, KX, G)
    else:
        z = ()
    if PDL and not (GATE_UP or FOLD):
        gdc_wait()
    if PDL or ASIDE:  # the order of the fold's rows is made beside the last programs
        gdc_launch_dependents()

    TPR: gl.constexpr = 8 if KX == 64 else 16 if KX == 128 else 32  # threads a row of 16-byte copies
    x_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // TPR, TPR], [4 * WGS, 1], [1, 0])
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BT, KX], gl.NVMMASharedLayout.get_default_for([BT, KX], dtype))
    token = gl.arange(0, BT, layout=gl.SliceLayout(1, x_layout))
    valid = token < count
    row = start + token
    if GATHER:
        if not DIRECT:
            row = gl.load(rows_ptr + token, mask=valid, other=0)
        row = row // top_k
    k = gl.arange(0, KX, layout=gl.SliceLayout(0, x_layout))
    x_ptrs = x_ptr + row.to(gl.int64)[:, None] * stride_x + (split * (K // SPLIT) + k)[None, :]
    left = stride_x - split * (K // SPLIT)  # inputs that x has from here on; behind them shared memory gets zeros
    for first in gl.static_range(AHEAD):
        if first < STEPS:
            x_mask = _inside(valid, k, left - first * KX, PAD_K)
            async_copy.async_copy_global_to_shared(x_smem.index(first), x_ptrs + first * KX, mask=x_mask)
        async_copy.commit_group()

    pairs = ()
    b0 = ()
    b1 = ()
    if FOLD:
        pairs = find_pairs(fold, start, expert, HALVES)
        b0 = load_b(pairs, tile * BM, N, 0, ROWS, HALVES, dtype)
        if SLABS == 2:
            b1 = load_b(pairs, tile * BM + ROWS, N, 0, ROWS, HALVES, dtype)
    acc0 = gl.zeros([ROWS, BT], gl.float32, layout=mma)
    acc1 = acc0
    last = gl.zeros([ROWS, 64], dtype, layout=operand)  # the fragment that may be in flight
    at = 0  # stage of x in use
    to = AHEAD  # stage of x to fill
    for turn in range(0, STEPS, UNROLL):
        for u in gl.static_range(UNROLL):
            t = turn + u
            async_copy.wait_group(AHEAD - 1)
            fence_async_shared()
            if t + AHEAD < STEPS:
                x_mask = _inside(valid, k, left - (t + AHEAD) * KX, PAD_K)
                async_copy.async_copy_global_to_shared(x_smem.index(to), x_ptrs + (t + AHEAD) * KX, mask=x_mask)
            async_copy.commit_group()
            after = gl.minimum(t + 1, STEPS - 1)
            qa_next = load_stage(w_ptrs, after, 0, WSLAB, TILES, STREAM)
            if SLABS == 2:
                qb_next = load_stage(w_ptrs, after, 1, WSLAB, TILES, STREAM)
            else:
                qb_next = ()
            s_next = load_scales(s_ptrs, after, SSLAB, SLABS, KX, G, FP4)
            if ZEROS:
                z_next = load_groups(z_ptrs, after, SSLAB, SLABS, KX, G)
            else:
                z_next = z
            x = x_smem.index(at)
            if POST:
                GROUPS: gl.constexpr = KX // G
                for g in gl.static_range(GROUPS):
                    z0 = gl.convert_layout(zero(z, g, ROWS, ZEROS, rows, dtype), in_operand, assert_trivial=True)
                    if SLABS == 2:
                        z1 = gl.convert_layout(
                            zero(z, GROUPS + g, ROWS, ZEROS, rows, dtype), in_operand, assert_trivial=True
                        )
                    sum0 = acc0
                    sum1 = acc1
                    held = ()
                    for j in gl.static_range(G // 64):
                        xj = x.slice(g * G + j * 64, 64, dim=1).permute((1, 0))
                        w = minus(unpack(qa[g * (G // 64) + j], operand, WGS, dtype), z0[:, None])
                        sum0 = warpgroup_mma(w, xj, sum0, use_acc=j > 0, is_async=True)
                        held = held + (w,)
                        if SLABS == 2:
                            w = minus(unpack(qb[g * (G // 64) + j], operand, WGS, dtype), z1[:, None])
                            sum1 = warpgroup_mma(w, xj, sum1, use_acc=j > 0, is_async=True)
                            held = held + (w,)
                    if SLABS == 2:
                        out = warpgroup_mma_wait(0, deps=(sum0, sum1) + held)
                        acc1 += out[1] * s[GROUPS + g].to(gl.float32)[:, None]
                    else:
                        out = warpgroup_mma_wait(0, deps=(sum0,) + held)
                    acc0 += out[0] * s[g].to(gl.float32)[:, None]
            else:
                for j in gl.static_range(TILES):
                    xj = x.slice(j * 64, 64, dim=1).permute((1, 0))
                    w = weights(qa[j], s, z, 0, j, KX, G, WGS, ZEROS, FP4, operand, dtype)
                    acc0 = warpgroup_mma(w, xj, acc0, is_async=True)
                    acc0, acc1, last = warpgroup_mma_wait(1, deps=(acc0, acc1, last))
                    last = w
                    if SLABS == 2:
                        w = weights(qb[j], s, z, 1, j, KX, G, WGS, ZEROS, FP4, operand, dtype)
                        acc1 = warpgroup_mma(w, xj, acc1, is_async=True)
                        acc0, acc1, last = warpgroup_mma_wait(1, deps=(acc0, acc1, last))
                        last = w
            at = gl.where(at == STAGES - 1, 0, at + 1)
            to = gl.where(to == STAGES - 1, 0, to + 1)
            qa = qa_next
            qb = qb_next
            s = s_next
            z = z_next
    if not POST:
        acc0, acc1, last = warpgroup_mma_wait(0, deps=(acc0, acc1, last))
    async_copy.wait_group(0)

    if PDL and FOLD:  # for xa, which the kernel before makes while this one sums
        gdc_wait()
    for i in gl.static_range(SLABS):
        acc = acc0 if i == 0 else acc1
        finish(
            acc, tile * BM + i * ROWS, expert, split, scale0, scale1, b_ptr, y_ptr, aside, fold,
            b0 if i == 0 else b1, pairs, rows_ptr, start, count, N, stride_y, top_k, alpha, limit,
            dtype, HALVES, ACT, ASIDE, FOLD, BIAS, FP4, not (GATE_UP or DIRECT),
        )  # fmt: skip


@gluon.jit(do_not_specialize=["slots", "experts", "top_k", "adapter_slots", "table_experts", "adapter_top_k"])
def grouped_int4_sm90(
    x_ptr,
    w_ptr,
    s_ptr,
    z_ptr,
    b_ptr,
    y_ptr,
    y1_ptr,
    xa_ptr,
    table_a_ptr,
    table_b_ptr,
    table_scale_ptr,
    table_rank_ptr,
    ids_ptr,
    work_ptr,
    rows_ptr,
    slots,
    experts,
    N,
    NR,
    stride_x,
    stride_y,
    stride_split,
    top_k,
    adapter_slots,
    stride_xa,
    stride_half,
    table_experts,
    adapter_top_k,
    alpha,
    limit,
    K: gl.constexpr,
    G: gl.constexpr,
    BT: gl.constexpr,
    BT_MIN: gl.constexpr,
    WGS: gl.constexpr,
    SLABS: gl.constexpr,
    KX: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    SPLIT: gl.constexpr,
    POST: gl.constexpr,
    GATE_UP: gl.constexpr,
    GATHER: gl.constexpr,
    HALVES: gl.constexpr,
    ACT: gl.constexpr,
    ASIDE: gl.constexpr,
    FOLD: gl.constexpr,
    BIAS: gl.constexpr,
    DIRECT: gl.constexpr,
    ZEROS: gl.constexpr,
    FP4: gl.constexpr,
    PAD_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """y = x . W[e]^T for every work item (expert, first sorted position, rows).

    Operands and constants:
        x_ptr: hidden states [T, stride_x] where GATHER, by token; else [R, stride_x] in sorted order.
        w_ptr: int32 [E, NR/64, K/64, 512], fragment order. s_ptr: fp16 [E, NR/64, K/G, 64]. z_ptr: uint8, as s_ptr.
        b_ptr: BIAS: fp32 [E, HALVES, N].
        y_ptr: GATE_UP: after ACT [R, N] in sorted order; ACT None: [R, HALVES * N], gate first. Else y2 [R, N] at
            row = token * top_k + slot; with SPLIT > 1 fp32 sums [SPLIT, R, N] of a part of K each, not rounded.
        y1_ptr, ids_ptr, adapter_slots: with ASIDE, `spec.adapters` Aside.
        xa_ptr ... ids_ptr, adapter_slots ... adapter_top_k: with FOLD, for single rows, an Expand; see `fold.fold_row`.
        work_ptr: int64 [slots]: expert << 48 | rows << 32 | first sorted position; -1: nothing.
            DIRECT: ids int32 or int64 [R], outside [0, experts): nothing; slot = row = position, one row a program.
        rows_ptr: int32 [slots, BT]: the rows of each work item.
        slots: number of work items. N: outputs of a half. NR: weight rows of an expert, padded. top_k: k.
        alpha, limit: of clamped_swiglu.
        K: inputs, padded; PAD_K: stride_x, those that x has, is less.
        BT: most rows of a work item. BT_MIN: items with fewer rows take tiles of BT/2 or BT/4, down to this.
        KX: columns a stage; a multiple of 64 that divides K / SPLIT. STAGES: stages of activations in shared memory.
        FP4: 0: integers. 16: NVFP4, 32: MXFP4 (bf16 activations, without POST): w_ptr holds E2M1 codes
            (`fragments.e2m1_words`), s_ptr int32 or int16 [E, NR/64, K/64, 64] the scales of a row of a tile
            (`scale_bytes`), z_ptr the fp32 scale of each expert and half, [E, HALVES].
        GROUP: work items that pass one weight tile one after the other, so that it stays in L2.
        PDL: launched while the kernel before still runs. gate_up waits for it before it reads work items; down reads
            them first, so what comes before down must have begun after the plan was complete. With FOLD the kernel
            before makes xa: it must have begun after ids and x were complete, and is waited for behind the sums.
    """
    BM: gl.constexpr = 64 * WGS * SLABS
    STREAM: gl.constexpr = GROUP == 1
    tiles = NR // BM * SPLIT
    pid = gl.program_id(0)
    group = pid // (GROUP * tiles)
    inside = pid % (GROUP * tiles)
    size = gl.minimum(slots - group * GROUP, GROUP)
    slot = group * GROUP + inside % size
    tile = inside // size
    split = tile % SPLIT
    tile = tile // SPLIT

    if PDL and GATE_UP and not FOLD:
        gdc_wait()  # for the plan; down finds it done, since gate_up waited for it
    if DIRECT:
        # Compared before an int64 id is narrowed.
        expert = gl.load(work_ptr + slot)
        expert = gl.where((expert >= 0) & (expert < experts), expert, -1).to(gl.int32)
        start = slot
        count = 1
    else:
        item = gl.load(work_ptr + slot)  # one word, so that nothing waits for a second load
        expert = (item >> 48).to(gl.int32)
        count = (item >> 32).to(gl.int32) & 0xFFFF
        start = item.to(gl.int32)
    if expert < 0:
        return

    first_slab = expert.to(gl.int64) * (NR // 64) + tile * (WGS * SLABS)
    w_ptr += first_slab * (K // 64 * 512) + split * (K // SPLIT // 64 * 512)
    scale0 = 1.0
    scale1 = 1.0
    if FP4 > 0:
        s_ptr += first_slab * K + split * (K // SPLIT)
        scale0 = gl.load(z_ptr + expert * HALVES) * 256.0
        scale1 = gl.load(z_ptr + expert * HALVES + (HALVES - 1)) * 256.0
    else:
        s_at = first_slab * (K // G * 64) + split * (K // SPLIT // G * 64)
        s_ptr += s_at
        z_ptr += s_at

    q_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4 * WGS, 1], [1, 0])
    thread = gl.arange(0, 128 * WGS, layout=gl.SliceLayout(1, q_layout))
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, q_layout))
    w_ptrs = w_ptr + ((thread // 128) * (K // 64 * 512) + thread % 128 * 4)[:, None] + word[None, :]
    y_ptr += split.to(gl.int64) * stride_split
    rows_ptr += slot.to(gl.int64) * BT

    aside = (y1_ptr, ids_ptr, adapter_slots)
    table = (table_a_ptr, table_b_ptr, table_scale_ptr, table_rank_ptr)
    fold = (xa_ptr, stride_xa, stride_half, table, ids_ptr, adapter_slots, table_experts, adapter_top_k)
    args = (
        x_ptr, w_ptrs, s_ptr, z_ptr, b_ptr, y_ptr, aside, fold, rows_ptr, expert, start, count, tile, split, scale0,
        scale1, N, stride_x, stride_y, top_k, alpha, limit,
    )  # fmt: skip
    T: gl.constexpr = BT_MIN if DIRECT else BT
    # fmt: off
    if BT_MIN < T:
        if count <= T // 2:
            if BT_MIN < T // 2:
                if count <= T // 4:
                    _run(args, K, G, T // 4, WGS, SLABS, KX, STAGES, SPLIT,
                         POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, FP4, PAD_K, PDL)
                else:
                    _run(args, K, G, T // 2, WGS, SLABS, KX, STAGES, SPLIT,
                         POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, FP4, PAD_K, PDL)
            else:
                _run(args, K, G, T // 2, WGS, SLABS, KX, STAGES, SPLIT,
                     POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, FP4, PAD_K, PDL)
        else:
            _run(args, K, G, T, WGS, SLABS, KX, STAGES, SPLIT,
                 POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, FP4, PAD_K, PDL)
    else:
        _run(args, K, G, T, WGS, SLABS, KX, STAGES, SPLIT,
             POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, FP4, PAD_K, PDL)
    # fmt: on
