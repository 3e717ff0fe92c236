"""Compiles the grouped product as a launch would, for a GPU that is not here."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from compiling import Resources
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


class _Absent:
    """The driver of a GPU that is not here; enough to compile."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(name: str, config: LaunchConfig, arch: int, dtype: torch.dtype, fused: bool) -> tuple[Resources, str]:
    """Resources and SASS of gate_up for one arch."""
    import triton
    from triton.runtime import driver

    from fanfold.kernels.grouped.launch import launch_arguments
    from fanfold.kernels.grouped.product import grouped_product

    fmt = WeightFormat.parse(name)
    fields = {key: field for key, field in codec.shapes(fmt, N, K).items() if field.required}
    tensors = {key: torch.zeros((EXPERTS, 2, *field.shape), dtype=field.dtypes[0]) for key, field in fields.items()}
    tokens = 8
    x = torch.zeros(tokens, K, dtype=dtype)
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
    )
    before = driver._active
    driver.set_active(_Absent(arch))
    try:
        kernel = grouped_product.warmup(grid=(1,), **arguments)
    finally:
        driver._active = before
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage, sass = (
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True, timeout=60).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Resources(int(found[1]), int(found[2]), kernel.metadata.shared), sass
