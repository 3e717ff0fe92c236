"""E2M1 weights on Hopper (Gluon): from packed words in registers to the left operand of wgmma, as `unpack` for int4."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fanfold.kernels.grouped.sm90.unpack import fragment, times


@gluon.jit
def _unpack_fp4(q):
    """A word of 8 E2M1 codes -> 8 bf16 of value * 2^-126, in the order of `_unpack_bf16` (`fragments.e2m1_words`)."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        and.b32 u, $8, 0x81c081c0;
        mov.b32 {$0, $1}, u;
        shl.b32 t, $8, 4;
        and.b32 u, t, 0x81c081c0;
        mov.b32 {$2, $3}, u;
        shf.r.wrap.b32 t, $8, $8, 6;
        and.b32 u, t, 0x81c081c0;
        mov.b32 {$4, $5}, u;
        shl.b32 t, $8, 6;
        and.b32 u, t, 0x80c080c0;
        shr.u32 t, $8, 2;
        lop3.b32 u, t, 0x01000100, u, 0xea;
        mov.b32 {$6, $7}, u;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [q],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _fp4_scales(words, groups: gl.constexpr, GROUP_K: gl.constexpr):
    """Words of the scales of one tile, [ROWS] -> bf16 of scale * 2^118, [ROWS, 64 / GROUP_K] (`scale_bytes`)."""
    if GROUP_K == 16:
        s0, s1, s2, s3 = gl.inline_asm_elementwise(
            """
            {
            .reg .b32 t, u;
            shl.b32 t, $4, 4;
            lop3.b32 u, t, 0x0ff00ff0, 0x70007000, 0xea;
            mov.b32 {$0, $2}, u;
            shr.u32 t, $4, 4;
            lop3.b32 u, t, 0x0ff00ff0, 0x70007000, 0xea;
            mov.b32 {$1, $3}, u;
            }""",
            "=h,=h,=h,=h,r",
            [words],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=1,
        )
        s = gl.join(gl.join(s0, s1), gl.join(s2, s3)).permute([0, 2, 1]).reshape([words.shape[0], 4])
    else:
        s0, s1 = gl.inline_asm_elementwise(
            "{ .reg .b32 t; prmt.b32 t, $2, 0, 0x4140; shl.b32 t, t, 7; mov.b32 {$0, $1}, t; }",
            "=h,=h,r",
            [words.to(gl.int32)],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=1,
        )
        s = gl.join(s0, s1)
    return gl.convert_layout(s, groups, assert_trivial=True)


@gluon.jit
def load_fp4_scales(s_ptrs, stage, SLAB: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr):
    """A word of scales [ROWS] of each tile of one stage: all tiles of slab 0, then of slab 1."""
    s = ()
    for i in gl.static_range(SLABS):
        for j in gl.static_range(TILES):
            s = s + (gl.load(s_ptrs + (stage * TILES + j) * 64 + i * SLAB),)
    return s


@gluon.constexpr_function
def by_group(WGS, GROUP_K):
    """The layout of wgmma's left operand [64 * WGS, 64], seen as [64 * WGS, 64 / GROUP_K, GROUP_K]."""
    k16 = [[0, 1, 0], [0, 2, 0]] if GROUP_K == 16 else [[0, 0, 16], [0, 1, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0], [0, 0, 8], *k16],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16 * 2**i, 0, 0] for i in range(2 + (WGS.bit_length() - 1))],
        block_bases=[],
        shape=[64 * WGS, 64 // GROUP_K, GROUP_K],
    )


@gluon.jit
def weights_fp4(q, s, GROUP_K: gl.constexpr, WGS: gl.constexpr, operand: gl.constexpr):
    """One tile of weights * 2^-8, exact in bf16."""
    groups: gl.constexpr = by_group(WGS, GROUP_K)
    w = fragment(_unpack_fp4(q), WGS).reshape([64 * WGS, 64 // GROUP_K, GROUP_K])
    w = gl.convert_layout(w, groups, assert_trivial=True)
    w, sc = gl.broadcast(w, _fp4_scales(s, gl.SliceLayout(2, groups), GROUP_K)[:, :, None])
    return gl.convert_layout(times(w, sc).reshape([64 * WGS, 64]), operand, assert_trivial=True)
