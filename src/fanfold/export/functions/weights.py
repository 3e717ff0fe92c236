"""Packed weights as arguments of the product: tensors and strides by the kind of format, as they lie on disk.

What `kernels/common/layouts.py` says of tensors, said in formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fanfold.export.description import Need, Value, product
from fanfold.formats import codec
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ProjectionWeights

FORMATS: Mapping[str, tuple[str, ...]] = {
    "grouped_int4": (
        *("gptq4-g128", "gptq4-g64", "gptq4-g32", "gptq4-g128-asym-v1", "gptq4-g128-asym-v2", "gptq4-g32-asym-v1"),
        *("packed4-g128", "packed4-g32", "packed4-g128-asym", "awq4-g128-asym"),
    ),
    "grouped_int8": ("gptq8-g128", "gptq8-channel", "packed8-g128", "packed8-channel"),
    "grouped_nvfp4": ("nvfp4", "nvfp4-divisor"),
    "grouped_mxfp4": ("mxfp4",),
    "grouped_fp8": ("fp8-tensor", "fp8-channel", "fp8-block128x128"),
    "grouped_plain": ("bf16", "fp16", "fp32"),
}
"""Op -> the formats of weights that it is exported for."""
N, EXPERTS = 384, 2
"""Of the launch that is compiled, as K: whatever is a multiple of 16 here must be one at run time, too."""
INPUTS, OUTPUTS = "inputs", "outputs"
TORCH_NAMES = {"int32": "i32", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "uint8": "u8"}
OPERANDS = {"w": "codes", "s": "scales", "z": "zeros"}
"""Argument of the kernel -> name of the buffer."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a matrix: its two axes, slowest first.

    Attributes:
        axes: letters of kernel arguments: n, k, or g for groups of k.
        shape: formulas.
    """

    axes: str
    shape: tuple[str, str]


def inputs_of(fmt: WeightFormat) -> int:
    """K of the launch that is compiled. Rows of codes start at multiples of 64 bytes, but gpt-oss's (K = 2880)."""
    return 288 if fmt.kind == "mxfp4" else 640


def tensors(fmt: WeightFormat) -> dict[str, Tensor]:
    """The tensors of a matrix, by operand: w (codes), s (scales), z (zero points)."""
    groups = "1" if fmt.group_size == -1 else f"ceil_div({INPUTS}, {fmt.group_size})"
    if fmt.dense:
        return {"w": Tensor("nk", (OUTPUTS, INPUTS))}
    if fmt.kind == "gptq":
        per = 32 // fmt.bits
        found = {
            "w": Tensor("kn", (f"{INPUTS} // {per}", OUTPUTS)),
            "s": Tensor("gn", (groups, OUTPUTS)),
            "z": Tensor("gn", (groups, f"{OUTPUTS} // {per}")),
        }
    elif fmt.kind == "packed":
        per = 32 // fmt.bits
        found = {
            "w": Tensor("nk", (OUTPUTS, f"{INPUTS} // {per}")),
            "s": Tensor("ng", (OUTPUTS, groups)),
            "z": Tensor("ng", (f"{OUTPUTS} // {per}", groups)),
        }
    elif fmt.kind == "awq":
        found = {
            "w": Tensor("kn", (INPUTS, f"{OUTPUTS} // 8")),
            "s": Tensor("gn", (groups, OUTPUTS)),
            "z": Tensor("gn", (groups, f"{OUTPUTS} // 8")),
        }
    elif fmt.kind in ("nvfp4", "mxfp4"):
        return {
            "w": Tensor("nk", (OUTPUTS, f"{INPUTS} // 8")),
            "s": Tensor("ng", (OUTPUTS, f"{INPUTS} // {fmt.group_size}")),
        }
    else:
        assert fmt.block is not None
        rows, columns = ("1" if size == -1 else f"{size}" for size in fmt.block)
        shape = (
            "1" if fmt.block[0] == -1 else OUTPUTS if rows == "1" else f"ceil_div({OUTPUTS}, {rows})",
            "1" if fmt.block[1] == -1 else f"ceil_div({INPUTS}, {columns})",
        )
        return {"w": Tensor("nk", (OUTPUTS, INPUTS)), "s": Tensor("ng", shape)}
    if fmt.symmetric:
        del found["z"]
    return found


def values(fmt: WeightFormat, halves: int) -> dict[str, Value]:
    """Values of the operands' members, for weights [E, P, ...] that lie one behind the other."""
    found: dict[str, Value] = {
        f"{operand}.stride_{axis}": Value("0", "not read") for operand in "sz" for axis in "epng"
    }
    found |= {"order.stride_e": Value("0", "not read"), "order.stride_p": Value("0", "not read")}
    whole_matrix = fmt.block == (-1, -1)
    for operand, tensor in tensors(fmt).items():
        buffer, (first, second) = OPERANDS[operand], tensor.shape
        found[f"{operand}.ptr"] = Value(buffer)
        of_expert, of_half = product(str(halves), first, second), product(first, second)
        found[f"{operand}.stride_e"] = Value(of_expert, f"elements of {buffer} from expert to expert")
        found[f"{operand}.stride_p"] = Value(of_half, f"elements of {buffer} from gate to up")
        if operand == "s" and whole_matrix:
            continue
        found[f"{operand}.stride_{tensor.axes[0]}"] = Value(second, f"elements of {buffer} along {tensor.axes[0]}")
        found[f"{operand}.stride_{tensor.axes[1]}"] = Value("1", f"elements of {buffer} along {tensor.axes[1]}")
    rows, columns = fmt.block or (1, fmt.group_size)
    found["s.rows"] = Value(OUTPUTS if rows == -1 else str(rows), "outputs that share a scale")
    found["s.group_size"] = Value(INPUTS if columns == -1 else str(columns), "inputs that share a scale")
    if fmt.kind == "nvfp4":
        found["m_ptr"] = Value("global_scales")
    return found


def needs(fmt: WeightFormat, halves: int, dtype: torch.dtype) -> dict[str, Need]:
    """What the buffers of the weights hold."""
    made = example(fmt, halves, dtype).tensors
    named = {"w": ("qweight", "packed", "weight"), "s": ("scales", "scale"), "z": ("qzeros", "zero_point")}
    found: dict[str, Need] = {}
    for operand, tensor in tensors(fmt).items():
        given = next(made[name] for name in named[operand] if name in made)
        words = operand == "w" and fmt.kind in ("nvfp4", "mxfp4")  # bytes, read as words
        kind = "i32" if words else TORCH_NAMES.get(str(given.dtype).removeprefix("torch."), "u8")
        found[OPERANDS[operand]] = Need(kind, ("experts", str(halves), *tensor.shape))
    if fmt.kind == "nvfp4":
        found["global_scales"] = Need("fp32", ("experts", str(halves)))
    return found


def example(fmt: WeightFormat, halves: int, dtype: torch.dtype) -> ProjectionWeights:
    """Weights without values; scales are in the dtype of compressed-tensors' model, or the first they may have."""
    made: dict[str, torch.Tensor] = {}
    k = inputs_of(fmt)
    for name, field in codec.shapes(fmt, N, k).items():
        if field.required:
            as_model = fmt.kind == "packed" and name == "scale" and dtype in field.dtypes
            kind = dtype if as_model else field.dtypes[0]
            made[name] = torch.empty((EXPERTS, halves, *field.shape), dtype=kind, device="meta")
    return ProjectionWeights(fmt, N, k, made)
