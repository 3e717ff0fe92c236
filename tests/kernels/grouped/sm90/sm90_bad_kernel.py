"""A kernel that is known to be wrong: the registers of an operand in flight take the next weights.

The smallest of its kind. A product of one fragment a loop turn, whose wait did not name it, gave NaN on an H200.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.jit
def one_operand(x_ptr, w_ptr, y_ptr, steps, IN_FLIGHT: gl.constexpr):
    """y [64, 64] = sum over steps of w [64, 64] . x [64, 64], with IN_FLIGHT products that no wait names."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    load: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, load))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, load))
    x = gl.load(x_ptr + rows[:, None] * 64 + columns[None, :])
    shared = gl.allocate_shared_memory(
        gl.bfloat16, [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16), x
    )
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, operand))
    k = gl.arange(0, 64, layout=gl.SliceLayout(0, operand))
    acc = gl.zeros([64, 64], gl.float32, layout=mma)
    for step in range(steps):
        w = gl.load(w_ptr + step * 4096 + n[:, None] * 64 + k[None, :])
        acc = warpgroup_mma(w, shared, acc, is_async=True)
        acc = warpgroup_mma_wait(IN_FLIGHT, deps=(acc,))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    t = gl.arange(0, 64, layout=gl.SliceLayout(0, mma))
    gl.store(y_ptr + n[:, None] * 64 + t[None, :], acc)
