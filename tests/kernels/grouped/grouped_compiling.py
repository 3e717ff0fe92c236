"""Compiles the grouped product as launches of layers would, for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from compiling import Resources, compile_launch
from fanfold.formats import codec
from fanfold.kernels.common.operands import RowScales
from fanfold.kernels.grouped.configs import all_configs, pinned_config
from fanfold.spec import Activation, ProjectionWeights, WeightFormat
from fanfold.spec.activation import ActivationKind
from fanfold.spec.adapters import Aside
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.work import WorkList

FORMATS = [
    *("bf16", "gptq2-g64-asym-v2", "gptq3-g64-asym-v1", "gptq4-g128", "gptq4-g32-asym-v1", "gptq8-channel"),
    *("gptq4-g128-actorder", "gptq3-g64-asym-v1-actorder", "packed3-g32-asym", "packed4-g64-asym", "packed8-channel"),
    *("awq4-g128-asym", "nvfp4", "nvfp4-divisor", "mxfp4", "fp8-tensor", "fp8-channel", "fp8-block128x128"),
]
"""Each kind, each number of bits, and each way to read codes, zero points, scales and groups."""
W8A8 = ["fp8-channel", "fp8-block128x128"]
TABLES = ["bf16", "gptq4-g128", "gptq4-g32-asym-v1", "nvfp4", "fp8-block128x128"]
"""Of each family of configs, and each place of scales: with every variant of the operations."""
ACTIVATIONS: dict[str, ActivationKind] = {
    "packed4-g64-asym": "gelu_tanh",
    "mxfp4": "clamped_swiglu",
    "nvfp4-divisor": "relu2",
}
"""SiLU behind the others."""
WITH_BIAS = ["mxfp4"]
N, K, EXPERTS, TOP_K, TOKENS = 256, 512, 2, 2, 8


@dataclass(frozen=True)
class Case:
    """One compiled kernel.

    Attributes:
        format: of the weights.
        config: tile sizes.
        down: the second projection, else gate_up.
        planned: over a plan, else over single rows.
        fused: with the activation.
        aside: y1 of rows with an adapter is set aside.
        w8a8: activations in 8 bits.
        dtype: of the activations.
    """

    format: str
    config: LaunchConfig
    down: bool = False
    planned: bool = True
    fused: bool = False
    aside: bool = False
    w8a8: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        op = ("grouped" if self.planned else "gather") + ("_down" if self.down else "_gate_up")
        words = [op, self.format, self.config.name]
        words += [word for word in ("fused", "aside", "w8a8") if getattr(self, word)]
        return " ".join(words + ([] if self.dtype == torch.bfloat16 else [str(self.dtype).removeprefix("torch.")]))


def cases(name: str, arch: str, dtype: torch.dtype = torch.bfloat16, w8a8: bool = False) -> Iterator[Case]:
    """What layers launch of this format over a plan, with every config of the tables.

    Of `TABLES` also gate_up with rows set aside; on sm_90 gate_up without an activation as well, and what a single
    token runs, without a plan. These differ from the rest in what comes before and after the sums alone.
    """
    fmt, compute = WeightFormat.parse(name), int(arch.removeprefix("sm_"))
    configs: dict[bool, list[LaunchConfig]] = {False: [], True: []}
    for config, fused in all_configs(fmt, K, dtype, compute, w8a8):
        configs[fused].append(config)
    for fused, found in configs.items():
        every = list(dict.fromkeys([*found, pinned_config(fmt, K, dtype, compute, fused, w8a8)]))
        for config in every:
            yield Case(name, config, down=not fused, fused=fused, w8a8=w8a8, dtype=dtype)
        if name not in TABLES or dtype != torch.bfloat16:
            continue
        if fused:
            for config in every:
                yield Case(name, config, fused=True, aside=True, w8a8=w8a8)
        if arch == "sm_90":
            yield Case(name, found[0], down=not fused, planned=False, fused=fused, w8a8=w8a8)
            if fused:
                yield Case(name, found[0], planned=False, fused=True, aside=True, w8a8=w8a8)
            else:
                yield Case(name, found[-1], w8a8=w8a8)


def compiled(case: Case, arch: str) -> Resources:
    """For one arch; disassembled where products can take weights from registers (Hopper)."""
    from fanfold.kernels.grouped.launch import launch_arguments
    from fanfold.kernels.grouped.product import grouped_product

    fmt, dtype = WeightFormat.parse(case.format), case.dtype
    kind = ACTIVATIONS.get(case.format, "silu")
    halves = 1 if case.down or kind == "relu2" else 2
    fields = {key: field for key, field in codec.shapes(fmt, N, K).items() if field.required}
    tensors = {
        key: torch.zeros((EXPERTS, halves, *field.shape), dtype=field.dtypes[0]) for key, field in fields.items()
    }
    bias = torch.zeros(EXPERTS, halves, N, dtype=dtype) if case.format in WITH_BIAS else None
    rows, scales = TOKENS * TOP_K, None
    x = torch.zeros(rows if case.down else TOKENS, K, dtype=torch.uint8 if case.w8a8 else dtype)
    if case.w8a8:
        size = fmt.activation_group(K)
        groups = -(-K // size)
        scales = RowScales(torch.zeros(x.shape[0], groups), groups, 1, size)
    slots = WorkList(torch.zeros(rows // case.config.block_t + EXPERTS, 4, dtype=torch.int32), case.config.block_t)
    ids = torch.zeros(rows, dtype=torch.int32)
    aside = None
    if case.aside:
        aside = Aside(torch.zeros(rows, halves * N, dtype=dtype), torch.zeros(TOKENS, dtype=torch.int32), 4, TOP_K)
    arguments = launch_arguments(
        "compile",
        x,
        ProjectionWeights(fmt, N, K, tensors, bias),
        slots if case.planned else ids,
        ids if case.planned else None,
        case.config,
        torch.zeros(rows, N if case.fused else halves * N, dtype=dtype),
        int(arch.removeprefix("sm_")),
        top_k=None if case.down else TOP_K,
        activation=Activation(kind) if case.fused else None,
        scatter=case.down and case.planned,
        x_scales=scales,
        aside=aside,
    )
    return compile_launch(grouped_product, arguments, arch, case.name, disassemble=arch == "sm_90")
