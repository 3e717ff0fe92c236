"""Random packed weights, made on the device as they would lie in memory: valid codes, scales of a trained model's size.

Nothing is quantised: codes are random bits, and the codec says what they mean. Dequantised weights have a standard
deviation of about 1 / sqrt(K), so that hidden states keep their size from step to step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fanfold.bench.jobs import LayerShape
from fanfold.bench.seeds import generator_of
from fanfold.formats.codec import INTEGER, shapes
from fanfold.spec.weight_format import WeightFormat
from fanfold.spec.weights import ExpertWeights, ProjectionWeights

E2M1_SIZE = 2.93
"""Root mean square of the 16 values of E2M1."""
E4M3_SIZE = 112.0
"""Standard deviation of FP8 codes: a quarter of the largest, as a scale of amax / 448 leaves it."""
BLOCK_SCALE = 128.0
"""The middle of NVFP4's block scales, which a global scale of amax / 2688 puts below 448."""


def random_experts(shape: LayerShape, fmt: WeightFormat, device: torch.device, seed: int) -> ExpertWeights:
    """The packed experts of one layer.

    Raises:
        UnsupportedError: the format can't hold such sizes.
    """
    generator = generator_of("weights", seed, device)
    sizes = shape.experts
    projections = [
        _Maker(fmt, (sizes.num_experts, halves), n, k, generator).projection(shape.bias)
        for halves, n, k in (
            (sizes.halves, sizes.intermediate, sizes.hidden),
            (1, sizes.hidden, sizes.intermediate),
        )
    ]
    return ExpertWeights(*projections)


@dataclass(frozen=True)
class _Maker:
    """Makes the fields of one projection, [E, P, ...]."""

    fmt: WeightFormat
    size: tuple[int, int]
    n: int
    k: int
    generator: torch.Generator

    def projection(self, bias: bool) -> ProjectionWeights:
        wanted = {name: field for name, field in shapes(self.fmt, self.n, self.k).items() if field.required}
        tensors = {name: self.field(name, field.shape, field.dtypes[0]) for name, field in wanted.items()}
        biases = self.normal((*self.size, self.n)).mul(0.1).bfloat16() if bias else None
        return ProjectionWeights(self.fmt, self.n, self.k, tensors, biases)

    def field(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stacked = (*self.size, *shape)
        match name:
            case "weight":
                return self.numbers(stacked, dtype)
            case "qzeros" | "zero_point":
                return self.zeros()
            case "g_idx":
                return self.order()
            case "scale" | "scales":
                return self.scales(stacked)
            case "global_scale":
                scale = self.around((self.k**-0.5) / (E2M1_SIZE * BLOCK_SCALE), stacked)
                return scale.reciprocal() if self.fmt.divisor else scale
            case _:  # codes: any bits are valid
                codes = torch.empty(stacked, dtype=dtype, device=self.generator.device)
                codes.view(torch.uint8).random_(0, 256, generator=self.generator)
                return codes

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Normal numbers, drawn a matrix at a time: a draw of all of them would need twice the room."""
        out = torch.empty(shape, dtype=dtype, device=self.generator.device)
        for matrix in out.flatten(0, 1):
            drawn = self.normal((self.n, self.k))
            matrix.copy_(drawn.mul_(E4M3_SIZE).clamp_(-448, 448) if self.fmt.kind == "fp8" else drawn * self.k**-0.5)
        return out

    def scales(self, shape: tuple[int, ...]) -> Tensor:
        """In the dtype in which the format's usual writers store them."""
        fmt, size = self.fmt, self.k**-0.5
        if fmt.kind == "nvfp4":
            return self.around(BLOCK_SCALE, shape).to(torch.float8_e4m3fn)
        if fmt.kind == "mxfp4":
            middle = 127 + round(math.log2(size / E2M1_SIZE))
            return self.integers(middle - 1, middle + 1, shape).to(torch.uint8)
        if fmt.kind == "fp8":
            return self.around(size / E4M3_SIZE, shape)
        codes = math.sqrt((4**fmt.bits - 1) / 12 + 0.25)  # of uniform codes around their zero point
        return self.around(size / codes, shape).to(torch.bfloat16 if fmt.kind == "packed" else torch.float16)

    def zeros(self) -> Tensor:
        """Zero points within 1 of the middle of the codes."""
        middle, groups = 1 << (self.fmt.bits - 1), self.fmt.groups(self.k)
        codec = INTEGER[self.fmt.kind]
        drawn = self.integers(middle - 1, middle + 1, (*self.size, groups, self.n)).flatten(0, 1)
        packed = torch.stack([codec.pack_zeros(self.fmt, zeros) for zeros in drawn])
        return packed.view(*self.size, *packed.shape[1:])

    def order(self) -> Tensor:
        """A shuffled g_idx for each expert, which gate and up share, as writers have it."""
        experts, halves = self.size
        group = self.k if self.fmt.group_size == -1 else self.fmt.group_size
        rows = [torch.randperm(self.k, generator=self.generator, device=self.generator.device) for _ in range(experts)]
        return torch.stack(rows).div(group, rounding_mode="floor").int().unsqueeze(1).expand(experts, halves, self.k)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def around(self, middle: float, shape: tuple[int, ...]) -> Tensor:
        """Uniform in [middle / 2, middle * 3 / 2)."""
        return (torch.rand(shape, generator=self.generator, device=self.generator.device) + 0.5) * middle

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        """Both ends included."""
        return torch.randint(low, high + 1, shape, generator=self.generator, device=self.generator.device)
