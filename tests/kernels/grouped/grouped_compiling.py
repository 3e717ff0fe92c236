"""Compiles the grouped product as a launch would, for a GPU that is not here."""

from __future__ import annotations

import torch

from compiling import Resources, compile_launch
from fanfold.formats import codec
from fanfold.spec import Activation, ProjectionWeights, WeightFormat
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.work import WorkList

# One of each way to read weights that has tables or code of its own.
FORMATS = [
    "bf16",
    "gptq4-g128",
    "gptq4-g32-asym-v1",
    "nvfp4",
    "fp8-block128x128",
]
# What differs from those in single functions.
OTHERS = [
    "gptq2-g64-asym-v2",
    "gptq3-g64-asym-v1",
    "gptq8-channel",
    "gptq4-g128-actorder",
    "gptq3-g64-asym-v1-actorder",
    "packed4-g64-asym",
    "packed3-g32-asym",
    "awq4-g128-asym",
    "nvfp4-divisor",
    "mxfp4",
    "fp8-tensor",
    "fp8-channel",
]
N, K, EXPERTS, TOP_K = 256, 512, 2, 2


def compiled(
    name: str, config: LaunchConfig, arch: int, dtype: torch.dtype, fused: bool, w8a8: bool = False
) -> Resources:
    """Of gate_up for one arch; disassembled where products can take weights from registers (Hopper)."""
    from fanfold.kernels.common.operands import RowScales
    from fanfold.kernels.grouped.launch import launch_arguments
    from fanfold.kernels.grouped.product import grouped_product

    fmt = WeightFormat.parse(name)
    fields = {key: field for key, field in codec.shapes(fmt, N, K).items() if field.required}
    tensors = {key: torch.zeros((EXPERTS, 2, *field.shape), dtype=field.dtypes[0]) for key, field in fields.items()}
    tokens, scales = 8, None
    x = torch.zeros(tokens, K, dtype=torch.uint8 if w8a8 else dtype)
    if w8a8:
        size = fmt.activation_group(K)
        groups = -(-K // size)
        scales = RowScales(torch.zeros(tokens, groups), groups, 1, size)
    work = WorkList(torch.zeros(tokens * TOP_K // config.block_t + EXPERTS, 4, dtype=torch.int32), config.block_t)
    arguments = launch_arguments(
        "compile",
        x,
        ProjectionWeights(fmt, N, K, tensors),
        work,
        torch.zeros(tokens * TOP_K, dtype=torch.int32),
        config,
        torch.zeros(tokens * TOP_K, N if fused else 2 * N, dtype=dtype),
        arch,
        top_k=TOP_K,
        activation=Activation("silu") if fused else None,
        x_scales=scales,
    )
    return compile_launch(grouped_product, arguments, f"sm_{arch}", disassemble=arch == 90)
