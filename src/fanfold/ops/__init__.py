"""torch.ops.fanfold.*: the reference on a CPU, the kernels on a GPU, under torch.compile and in CUDA graphs.

The operations of a layer by themselves, for hosts that compose one of their own; weights as they lie on disk. The
layer as one operation, with weights prepared for the GPU, is `fanfold.Experts`.
"""

from fanfold.ops import lora, nvfp4, nvfp4_packing, products, routing, rows
from fanfold.ops.op import Op as Op
from fanfold.ops.op import register
from fanfold.ops.packed import packed as packed
from fanfold.ops.products import plan_tile as plan_tile

OPS: dict[str, Op] = {**routing.OPS, **products.OPS, **rows.OPS, **lora.OPS, **nvfp4.OPS, **nvfp4_packing.OPS}
for _name, _op in OPS.items():
    register(_name, _op)
