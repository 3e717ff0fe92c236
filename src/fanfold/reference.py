"""The oracle: what every operation computes, in readable torch (docs/semantics.md is the contract)."""

from fanfold.formats.codec import dequantize as dequantize
from fanfold.formats.codec import dequantize_expert as dequantize_expert
from fanfold.formats.codec import pack as pack
from fanfold.formats.codec import quantize as quantize
from fanfold.formats.codec import unpack as unpack
from fanfold.kernels.activation.reference import activate as activate
from fanfold.kernels.combine.reference import combine as combine
from fanfold.kernels.grouped.reference import grouped as grouped
from fanfold.kernels.lora.reference import lora_fold as lora_fold
from fanfold.kernels.nvfp4 import reference as _nvfp4
from fanfold.layers.reference import layer as layer
from fanfold.routing.reference import plan_blocks as plan_blocks
from fanfold.routing.reference import plan_sort as plan_sort
from fanfold.routing.reference import route_topk as route_topk
from fanfold.routing.reference import work_list as work_list

nvfp4_pack_rows = _nvfp4.pack_rows
nvfp4_unpack_rows = _nvfp4.unpack_rows
nvfp4_swizzle = _nvfp4.swizzle
nvfp4_unswizzle = _nvfp4.unswizzle
nvfp4_product = _nvfp4.product
