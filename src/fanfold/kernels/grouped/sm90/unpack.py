"""4-bit weights on Hopper (Gluon): from packed words in registers to the left operand of wgmma.

Weights lie in fragment order (`fragments`): the 16 bytes a thread loads are its own part of a 64 x 64 tile, so
unpacking moves nothing between threads, and the compiler is asked to prove it (`assert_trivial`).
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _unpack_bf16(q):
    """A word of 8 nibbles -> 8 bf16 `128 + q`: nibbles 0, 4, 1, 5, 2, 6, 3, 7."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        lop3.b32 u, $8, 0x000f000f, 0x43004300, 0xea;
        mov.b32 {$0, $1}, u;
        shr.u32 t, $8, 4;
        lop3.b32 u, t, 0x000f000f, 0x43004300, 0xea;
        mov.b32 {$2, $3}, u;
        shr.u32 t, $8, 8;
        lop3.b32 u, t, 0x000f000f, 0x43004300, 0xea;
        mov.b32 {$4, $5}, u;
        shr.u32 t, $8, 12;
        lop3.b32 u, t, 0x000f000f, 0x43004300, 0xea;
        mov.b32 {$6, $7}, u;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [q],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _unpack_fp16(q):
    """As `_unpack_bf16`, but fp16 `1024 + q`."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        lop3.b32 u, $8, 0x000f000f, 0x64006400, 0xea;
        mov.b32 {$0, $1}, u;
        shr.u32 t, $8, 4;
        lop3.b32 u, t, 0x000f000f, 0x64006400, 0xea;
        mov.b32 {$2, $3}, u;
        shr.u32 t, $8, 8;
        lop3.b32 u, t, 0x000f000f, 0x64006400, 0xea;
        mov.b32 {$4, $5}, u;
        shr.u32 t, $8, 12;
        lop3.b32 u, t, 0x000f000f, 0x64006400, 0xea;
        mov.b32 {$6, $7}, u;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [q],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _scale_bf16(w, zero, hi, lo):
    """bf16((w - zero) * (hi + lo)), rounded once.

    hi = bf16(scale) and lo = scale - hi: an fp16 scale has 11 significant bits, so lo has at most 3 and
    (q - zero) * lo is exact; the fma then rounds the exact sum.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 d, t;
        sub.bf16x2 d, $1, $2;
        mul.bf16x2 t, d, $4;
        fma.rn.bf16x2 $0, d, $3, t;
        }""",
        "=r,r,r,r,r",
        [w, zero, hi, lo],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _scale_fp16(w, zero, scale):
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 d;
        sub.f16x2 d, $1, $2;
        mul.f16x2 $0, d, $3;
        }""",
        "=r,r,r,r",
        [w, zero, scale],
        dtype=gl.float16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def load_stage(w_ptrs, stage, i: gl.constexpr, SLAB: gl.constexpr, TILES: gl.constexpr, STREAM: gl.constexpr):
    """The thread's words of all tiles of slab i of a stage."""
    q = ()
    for j in gl.static_range(TILES):
        words = w_ptrs + stage * (TILES * 512) + (i * SLAB + j * 512)
        if STREAM:  # read once: leaves the caches to the activations
            q = q + (gl.load(words, eviction_policy="evict_first"),)
        else:
            q = q + (gl.load(words),)
    return q


@gluon.jit
def load_groups(s_ptrs, stage, SLAB: gl.constexpr, SLABS: gl.constexpr, KX: gl.constexpr, G: gl.constexpr):
    """Scales (or zeros) of one stage: all groups of slab 0, then of slab 1."""
    GROUPS: gl.constexpr = KX // G if KX > G else 1
    first = stage * KX // G
    s = ()
    for i in gl.static_range(SLABS):
        for j in gl.static_range(GROUPS):
            s = s + (gl.load(s_ptrs + ((first + j) * 64 + i * SLAB)),)
    return s


@gluon.jit
def _fragment(n, WGS: gl.constexpr):
    """Nibbles 0, 4, 1, 5, 2, 6, 3, 7 of each word [128 * WGS, 4] -> [64 * WGS, 64]; nibble = 4 * j + 2 * row8 + k8."""
    low = gl.join(gl.join(n[0], n[1]), gl.join(n[2], n[3]))
    high = gl.join(gl.join(n[4], n[5]), gl.join(n[6], n[7]))
    w = gl.join(low, high).reshape([4 * WGS, 8, 4, 4, 2, 2, 2])  # warp, row, c, word, j, k8, row8
    return w.permute([0, 6, 1, 3, 5, 2, 4]).reshape([64 * WGS, 64])


@gluon.jit
def unpack(q, operand: gl.constexpr, WGS: gl.constexpr, dtype: gl.constexpr):
    """Packed words [128 * WGS, 4] -> [64 * WGS, 64] of 128 + q (fp16: 1024 + q) as the left operand of wgmma."""
    if dtype == gl.bfloat16:
        w = _fragment(_unpack_bf16(q), WGS)
    else:
        w = _fragment(_unpack_fp16(q), WGS)
    return gl.convert_layout(w, operand, assert_trivial=True)


@gluon.jit
def zero(z, j: gl.constexpr, ROWS: gl.constexpr, ZEROS: gl.constexpr, rows: gl.constexpr, dtype: gl.constexpr):
    """By how much unpacked weights are too large, [ROWS]: what unpacking adds, and the zero point; exact."""
    base: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    if ZEROS:
        return (z[j].to(gl.float32) + base).to(dtype)
    else:
        return gl.full([ROWS], base + 8.0, dtype, layout=rows)


@gluon.jit
def minus(w, z):
    """w - z, two at a time."""
    w, z = gl.broadcast(w, z)
    if w.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "sub.bf16x2 $0, $1, $2;", "=r,r,r", [w, z], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "sub.f16x2 $0, $1, $2;", "=r,r,r", [w, z], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def _scaled(w, z, s):
    """act((w - z) * s) with s [., .] in fp32 that holds an fp16 value."""
    w, z = gl.broadcast(w, z)
    hi = s.to(w.dtype)
    if w.dtype == gl.bfloat16:
        lo = (s - hi.to(gl.float32)).to(gl.bfloat16)
        w, hi = gl.broadcast(w, hi)
        w, lo = gl.broadcast(w, lo)
        return _scale_bf16(w, z, hi, lo)
    else:
        w, hi = gl.broadcast(w, hi)
        return _scale_fp16(w, z, hi)


@gluon.jit
def _weights_int4(
    q,
    s,
    z,
    i: gl.constexpr,
    j: gl.constexpr,
    KX: gl.constexpr,
    G: gl.constexpr,
    WGS: gl.constexpr,
    ZEROS: gl.constexpr,
    operand: gl.constexpr,
    dtype: gl.constexpr,
):
    """Weights of tile j of slab i of a stage, scaled."""
    ROWS: gl.constexpr = 64 * WGS
    rows: gl.constexpr = gl.SliceLayout(1, operand)
    GROUPS: gl.constexpr = KX // G if KX > G else 1
    w = unpack(q, operand, WGS, dtype)
    if G < 64:  # groups of 32: the first and second half of the tile
        first = (gl.arange(0, 64, layout=gl.SliceLayout(0, operand)) < 32)[None, :]
        g: gl.constexpr = i * GROUPS + j * 2
        sc = gl.where(first, s[g].to(gl.float32)[:, None], s[g + 1].to(gl.float32)[:, None])
        if ZEROS:
            zr = gl.where(
                first, zero(z, g, ROWS, ZEROS, rows, dtype)[:, None], zero(z, g + 1, ROWS, ZEROS, rows, dtype)[:, None]
            )
        else:
            zr = zero(z, g, ROWS, ZEROS, rows, dtype)[:, None]
        return _scaled(w, zr, sc)
    else:
        g: gl.constexpr = i * GROUPS + (j * 64) // G
        return _scaled(w, zero(z, g, ROWS, ZEROS, rows, dtype)[:, None], s[g].to(gl.float32)[:, None])


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
def _times(w, s):
    """w * s, two at a time."""
    return gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $2;", "=r,r,r", [w, s], dtype=gl.bfloat16, is_pure=True, pack=2
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
def _load_fp4_scales(s_ptrs, stage, SLAB: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr):
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
def _weights_fp4(q, s, GROUP_K: gl.constexpr, WGS: gl.constexpr, operand: gl.constexpr):
    """One tile of weights * 2^-8, exact in bf16."""
    groups: gl.constexpr = by_group(WGS, GROUP_K)
    w = _fragment(_unpack_fp4(q), WGS).reshape([64 * WGS, 64 // GROUP_K, GROUP_K])
    w = gl.convert_layout(w, groups, assert_trivial=True)
    w, sc = gl.broadcast(w, _fp4_scales(s, gl.SliceLayout(2, groups), GROUP_K)[:, :, None])
    return gl.convert_layout(_times(w, sc).reshape([64 * WGS, 64]), operand, assert_trivial=True)


@gluon.jit
def weights(
    q,
    s,
    z,
    i: gl.constexpr,
    j: gl.constexpr,
    KX: gl.constexpr,
    G: gl.constexpr,
    WGS: gl.constexpr,
    ZEROS: gl.constexpr,
    FP4: gl.constexpr,
    operand: gl.constexpr,
    dtype: gl.constexpr,
):
    """Scaled weights of tile j of slab i of a stage, from its words q."""
    if FP4 > 0:
        return _weights_fp4(q, s[i * (KX // 64) + j], FP4, WGS, operand)
    else:
        return _weights_int4(q, s, z, i, j, KX, G, WGS, ZEROS, operand, dtype)


@gluon.jit
def load_scales(
    s_ptrs, stage, SLAB: gl.constexpr, SLABS: gl.constexpr, KX: gl.constexpr, G: gl.constexpr, FP4: gl.constexpr
):
    """Scales of one stage, as the format has them."""
    if FP4 > 0:
        return _load_fp4_scales(s_ptrs, stage, SLAB, SLABS, KX // 64)
    else:
        return load_groups(s_ptrs, stage, SLAB, SLABS, KX, G)
