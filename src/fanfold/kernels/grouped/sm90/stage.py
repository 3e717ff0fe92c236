"""What a stage of the Hopper product loads of its weights (Gluon): packed words, scales and zero points."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Gluon's builtins carry no types.)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fanfold.kernels.grouped.sm90.unpack_fp4 import load_fp4_scales


@gluon.jit
def load_stage(w_ptrs, stage, SLAB: gl.constexpr, SLABS: gl.constexpr, TILES: gl.constexpr, STREAM: gl.constexpr):
    """The thread's words of one stage: all tiles of slab 0, then of slab 1."""
    q = ()
    for i in gl.static_range(SLABS):
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
def load_scales(
    s_ptrs, stage, SLAB: gl.constexpr, SLABS: gl.constexpr, KX: gl.constexpr, G: gl.constexpr, FP4: gl.constexpr
):
    """Scales of one stage, as the format has them."""
    if FP4 > 0:
        return load_fp4_scales(s_ptrs, stage, SLAB, SLABS, KX // 64)
    else:
        return load_groups(s_ptrs, stage, SLAB, SLABS, KX, G)
