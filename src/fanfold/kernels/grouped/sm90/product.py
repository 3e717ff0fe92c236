"""The grouped product with 4-bit weights on Hopper (Gluon).

One program makes `64 * WGS * SLABS` weight rows for up to BT token rows of one expert; `tile` does the work.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from fanfold.kernels.grouped.sm90.tile import run_tile

MANY = gl.constexpr(128)
"""Rows of a tile from which on there are bodies for five and for six eighths of it."""


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
    SHORT: gl.constexpr,
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
        SHORT: bf16 holds all integer scales, and they are applied to the weights.
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
    # Tiles by the rows that there are: smaller ones save products, and the rest of the work for a weight is the same.
    # fmt: off
    if BT_MIN < T and count <= T // 2:
        if BT_MIN < T // 2 and count <= T // 4:
            run_tile(args, K, G, T // 4, 0, WGS, SLABS, KX, STAGES, SPLIT,
                 POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, SHORT, FP4, PAD_K, PDL)
        else:
            run_tile(args, K, G, T // 2, 0, WGS, SLABS, KX, STAGES, SPLIT,
                 POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, SHORT, FP4, PAD_K, PDL)
    elif BT_MIN < T and T >= MANY and count <= T // 2 + T // 4:
        if count <= T // 2 + T // 8:
            run_tile(args, K, G, T // 2, T // 8, WGS, SLABS, KX, STAGES, SPLIT,
                 POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, SHORT, FP4, PAD_K, PDL)
        else:
            run_tile(args, K, G, T // 2, T // 4, WGS, SLABS, KX, STAGES, SPLIT,
                 POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, SHORT, FP4, PAD_K, PDL)
    else:
        run_tile(args, K, G, T, 0, WGS, SLABS, KX, STAGES, SPLIT,
             POST, STREAM, GATE_UP, GATHER, HALVES, ACT, ASIDE, FOLD, BIAS, DIRECT, ZEROS, SHORT, FP4, PAD_K, PDL)
    # fmt: on
