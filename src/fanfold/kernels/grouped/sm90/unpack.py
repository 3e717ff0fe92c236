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

    lo has at most 3 bits, so (w - zero) * lo is exact; the fma then rounds the exact sum.
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
def fragment(n, WGS: gl.constexpr):
    """Nibbles 0, 4, 1, 5, 2, 6, 3, 7 of each word [128 * WGS, 4] -> [64 * WGS, 64]; nibble = 4 * j + 2 * row8 + k8."""
    low = gl.join(gl.join(n[0], n[1]), gl.join(n[2], n[3]))
    high = gl.join(gl.join(n[4], n[5]), gl.join(n[6], n[7]))
    w = gl.join(low, high).reshape([4 * WGS, 8, 4, 4, 2, 2, 2])  # warp, row, c, word, j, k8, row8
    return w.permute([0, 6, 1, 3, 5, 2, 4]).reshape([64 * WGS, 64])


@gluon.jit
def unpack(q, operand: gl.constexpr, WGS: gl.constexpr, dtype: gl.constexpr):
    """Packed words [128 * WGS, 4] -> [64 * WGS, 64] of 128 + q (fp16: 1024 + q) as the left operand of wgmma."""
    if dtype == gl.bfloat16:
        w = fragment(_unpack_bf16(q), WGS)
    else:
        w = fragment(_unpack_fp16(q), WGS)
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
def times(w, s):
    """w * s, two at a time."""
    return gl.inline_asm_elementwise(
        "mul.bf16x2 $0, $1, $2;", "=r,r,r", [w, s], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.constexpr_function
def unit(dtype):
    """What sums with weights of `weights_int4` are multiplied by, exactly."""
    return 2.0**22 if dtype == gl.bfloat16 else 1.0


@gluon.jit
def _unpack_tiny(q):
    """A word of 8 nibbles -> 8 bf16, in the order of `_unpack_bf16`: q * 2^-133, where q is odd-numbered 16 times that.

    Below 2^-125 bf16 numbers lie 2^-133 apart: their bits are integers, in whichever of the 8 lowest they stand.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        and.b32 u, $8, 0x000f000f;
        mov.b32 {$0, $1}, u;
        and.b32 u, $8, 0x00f000f0;
        mov.b32 {$2, $3}, u;
        shr.u32 t, $8, 8;
        and.b32 u, t, 0x000f000f;
        mov.b32 {$4, $5}, u;
        and.b32 u, t, 0x00f000f0;
        mov.b32 {$6, $7}, u;
        }""",
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [q],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _parts_of_scale(s):
    """fp32 s that holds an fp16 value -> bf16 hi and lo, hi + lo = s * 2^111, and both over 16.

    hi has 8 of the 11 bits; the others are lo.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, h, l, p, sixteenth;
        mul.f32 t, $4, 0f77000000;
        and.b32 h, t, 0xffff0000;
        sub.f32 l, t, h;
        cvt.rn.bf16x2.f32 p, l, h;
        mov.b32 {$0, $1}, p;
        mov.b32 sixteenth, 0x3d803d80;
        mul.bf16x2 p, p, sixteenth;
        mov.b32 {$2, $3}, p;
        }""",
        "=h,=h,=h,=h,r",
        [s],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _short_scale(s):
    """fp32 s that holds a bf16 value -> bf16 s * 2^111, that times -8 as `_unpack_tiny` has it; a 16th, the same."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, c, p;
        mul.f32 t, $4, 0f77000000;
        mul.f32 c, $4, 0fB6000000;
        cvt.rn.bf16x2.f32 p, c, t;
        mov.b32 {$0, $1}, p;
        mul.f32 t, t, 0f3D800000;
        cvt.rn.bf16x2.f32 p, c, t;
        mov.b32 {$2, $3}, p;
        }""",
        "=h,=h,=h,=h,r",
        [s],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _fma(w, s, c):
    """w * s + c, rounded once, two at a time."""
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [w, s, c], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _of_columns(odd, first, second):
    """[ROWS, 64] of first, where a column's nibble is odd-numbered of second."""
    odd, first = gl.broadcast(odd, first)
    odd, second = gl.broadcast(odd, second)
    return gl.where(odd, second, first)


@gluon.jit
def _tiny_zero(z, j: gl.constexpr, ROWS: gl.constexpr, ZEROS: gl.constexpr, rows: gl.constexpr):
    """The zero point of group j as `_unpack_tiny` has numbers, bf16 [ROWS], and 16 times that."""
    if ZEROS:
        bits = z[j].to(gl.int16)
        return bits.to(gl.bfloat16, bitcast=True), (bits * 16).to(gl.bfloat16, bitcast=True)
    else:
        bits = gl.full([ROWS], 8, gl.int16, layout=rows)
        return bits.to(gl.bfloat16, bitcast=True), (bits * 16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _weights_bf16(
    q,
    s,
    z,
    g: gl.constexpr,
    WGS: gl.constexpr,
    ZEROS: gl.constexpr,
    SHORT: gl.constexpr,
    operand: gl.constexpr,
):
    """bf16((q - zero) * s) / unit of a tile, with the scale and zero point of group g.

    SHORT: bf16 holds the scales. Then a product with one is exact before it is rounded, and the constant zero point
    goes into the same fma.
    """
    ROWS: gl.constexpr = 64 * WGS
    rows: gl.constexpr = gl.SliceLayout(1, operand)
    w = gl.convert_layout(fragment(_unpack_tiny(q), WGS), operand, assert_trivial=True)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, operand))
    odd = (column // 8 % 2 == 1)[None, :]
    zr, zr16 = _tiny_zero(z, g, ROWS, ZEROS, rows)
    scale = s[g].to(gl.float32)
    if SHORT:
        hi, c, hi16, c16 = _short_scale(scale)
        hi = _of_columns(odd, hi[:, None], hi16[:, None])
        if ZEROS:
            return times(minus(w, _of_columns(odd, zr[:, None], zr16[:, None])), hi)
        else:
            return _fma(w, hi, _of_columns(odd, c[:, None], c16[:, None]))
    else:
        hi, lo, hi16, lo16 = _parts_of_scale(scale)
        return _scale_bf16(
            w,
            _of_columns(odd, zr[:, None], zr16[:, None]),
            _of_columns(odd, hi[:, None], hi16[:, None]),
            _of_columns(odd, lo[:, None], lo16[:, None]),
        )


@gluon.jit
def _weights_fp16(
    q,
    s,
    z,
    g: gl.constexpr,
    WGS: gl.constexpr,
    ZEROS: gl.constexpr,
    operand: gl.constexpr,
):
    """fp16((q - zero) * s) of a tile of group g."""
    zr = zero(z, g, 64 * WGS, ZEROS, gl.SliceLayout(1, operand), gl.float16)
    w, zr = gl.broadcast(unpack(q, operand, WGS, gl.float16), zr[:, None])
    w, sc = gl.broadcast(w, s[g][:, None])
    return _scale_fp16(w, zr, sc)


@gluon.jit
def weights_int4(
    q,
    s,
    z,
    i: gl.constexpr,
    j: gl.constexpr,
    KX: gl.constexpr,
    G: gl.constexpr,
    WGS: gl.constexpr,
    ZEROS: gl.constexpr,
    SHORT: gl.constexpr,
    operand: gl.constexpr,
    dtype: gl.constexpr,
):
    """Weights of tile j of slab i of a stage, scaled."""
    GROUPS: gl.constexpr = KX // G if KX > G else 1
    g: gl.constexpr = i * GROUPS + j * 64 // G
    if dtype == gl.bfloat16:
        w = _weights_bf16(q, s, z, g, WGS, ZEROS, SHORT, operand)
    else:
        w = _weights_fp16(q, s, z, g, WGS, ZEROS, operand)
    if G < 64:  # groups of 32: the second half of the tile
        if dtype == gl.bfloat16:
            second = _weights_bf16(q, s, z, g + 1, WGS, ZEROS, SHORT, operand)
        else:
            second = _weights_fp16(q, s, z, g + 1, WGS, ZEROS, operand)
        first = (gl.arange(0, 64, layout=gl.SliceLayout(0, operand)) < 32)[None, :]
        w = gl.where(gl.broadcast(first, w)[0], w, second)
    return w
