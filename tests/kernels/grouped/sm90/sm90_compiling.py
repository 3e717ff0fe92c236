"""Compiles the Hopper product as a launch would, without a GPU: each tuned config, and every one that layers get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product as product_of

import torch

from compiling import Resources, compile_launch
from fanfold.kernels.grouped.sm90 import product
from fanfold.kernels.grouped.sm90.config import Sm90Config, check_config
from fanfold.kernels.grouped.sm90.configs import config_for, pinned_config
from fanfold.kernels.grouped.sm90.launch import launch_arguments
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.kernels.grouped.sm90.weights import SCALES, FragmentWeights
from fanfold.spec import Activation, WeightFormat
from fanfold.spec.activation import ActivationKind
from fanfold.spec.adapters import AdapterTable, Aside, Expand
from fanfold.spec.work import WorkItems

FORMATS = ("gptq4-g128", "gptq4-g128-asym-v1", "gptq4-g64-asym-v1", "gptq4-g32-asym-v1", "nvfp4", "mxfp4")
LAYERS = (
    *((128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 8, 7168, 2048), (128, 4, 2880, 2880), (512, 10, 2048, 512)),
    *((64, 8, 2048, 1408), (16, 4, 6144, 10752), (256, 8, 7168, 2048), (64, 6, 2048, 1024)),
)
"""E, k, H, I."""
FEW = Sm90Config(32, 16, 1, 2, 256, 2, 1, True)
MANY = Sm90Config(64, 16, 1, 2, 128, 3, 4, False)
SHORT = Sm90Config(8, 8, 1, 2, 64, 3, 1, False)
"""The fewest tiles of K that two fragments in turn allow."""

SPILLS = {
    ("gptq4-g128", 1): {
        "t128-32-w4x1-k128-s3-g8": 8,
    },
    ("gptq4-g128-asym-v1", 1): {
        "t128-32-w4x1-k128-s3-g8": 40,
    },
    ("gptq4-g32-asym-v1", 1): {
        "t128-32-w1x2-k128-s3": 160,
        "t128-32-w1x2-k128-s3-g8": 160,
        "t128-32-w2x2-k128-s3-g8": 128,
        "t128-32-w4x1-k128-s3-g8": 120,
    },
    ("gptq4-g32-asym-v1", 2): {
        "t128-32-w1x2-k128-s3": 168,
        "t128-32-w1x2-k128-s3-g8": 160,
        "t128-32-w2x2-k128-s3-g8": 136,
    },
    ("gptq4-g64-asym-v1", 1): {
        "t128-32-w1x2-k128-s3": 64,
        "t128-32-w1x2-k128-s3-g8": 64,
        "t128-32-w2x2-k128-s3-g8": 40,
        "t128-32-w4x1-k128-s3-g8": 32,
        "t32-16-w1x2-k256-s2-sum": 72,
    },
    ("gptq4-g64-asym-v1", 2): {
        "t128-32-w1x2-k128-s3": 72,
        "t128-32-w1x2-k128-s3-g8": 72,
        "t128-32-w2x2-k128-s3-g8": 48,
    },
    ("packed4-g128", 1): {
        "t128-32-w4x1-k128-s3-g8": 8,
    },
    ("packed4-g32", 2): {
        "t128-32-w1x2-k128-s3-g4": 48,
    },
}
"""Bytes that spill, by format, halves and config: tiles that measured fastest all the same (docs/measured.md), or that
layers take which are not in the table."""


@dataclass(frozen=True)
class Kernel:
    """What the device compiles depends on nothing else."""

    format: str
    halves: int
    n: int
    k: int
    config: Sm90Config
    single: bool = False
    chained: bool = True
    dtype: torch.dtype = torch.bfloat16
    activation: ActivationKind | None = "silu"
    bias: bool = False
    ordered: bool = False
    aside: bool = False
    expand: bool = False
    short: bool = False

    @property
    def name(self) -> str:
        parts = [self.format, "gate_up" if self.halves == 2 else "down", f"k{self.k}", self.config.name]
        parts += [self.activation or "y1"] if self.halves == 2 and self.activation != "silu" else []
        parts += [word for word in ("bias", "ordered", "aside", "expand", "short") if getattr(self, word)]
        parts += ["single"] if self.single else []
        parts += [] if self.chained else ["unchained"]
        parts += ["fp16"] if self.dtype == torch.float16 else []
        return " ".join(parts)


def tuned_kernels() -> list[Kernel]:
    """Each once; the number of outputs is an argument."""
    found: dict[Kernel, None] = {}
    for row in read_table():
        name = "gptq4-g128" if row.format == "int4" else row.format
        for halves, k, config in ((2, row.hidden, row.gate_up), (1, row.intermediate, row.down)):
            kernel = Kernel(name, halves, config.rows // halves, k, config, row.tokens == 1, row.chained)
            if row.format == "mxfp4":
                kernel = replace(kernel, activation="clamped_swiglu", bias=True)
            found[kernel] = None
    return list(found)


def other_kernels() -> list[Kernel]:
    """Other group sizes, zero points, fp16, E2M1 codes and epilogues."""
    return [
        Kernel("gptq4-g32-asym-v1", 2, 64, 512, MANY),
        Kernel("gptq4-g64-asym-v1", 1, 128, 512, FEW),
        Kernel("gptq4-g64-asym-v1", 1, 128, 512, MANY, dtype=torch.float16),
        Kernel("gptq4-g128", 2, 64, 512, FEW, dtype=torch.float16),
        Kernel("nvfp4", 2, 64, 2048, replace(MANY, block_t=16, together=1)),
        Kernel("mxfp4", 1, 128, 2048, replace(MANY, block_t=16, together=1)),
        Kernel("mxfp4", 2, 64, 448, MANY, activation="clamped_swiglu", bias=True),
        Kernel("mxfp4", 1, 192, 448, MANY, bias=True),
        Kernel("gptq4-g128", 2, 64, 512, MANY, single=True, activation=None),
        Kernel("gptq4-g128", 2, 64, 512, MANY, aside=True),
        Kernel("gptq4-g128", 2, 64, 512, FEW, single=True, expand=True),
        Kernel("gptq4-g64-asym-v1", 1, 128, 512, FEW, dtype=torch.float16, single=True, expand=True),
        Kernel("nvfp4", 2, 64, 2048, replace(MANY, block_t=128, smallest_t=32), aside=True),
        Kernel("gptq4-g32", 2, 64, 128, SHORT),
        Kernel("nvfp4", 1, 128, 128, SHORT, chained=False),
        Kernel("gptq4-g128-actorder", 2, 64, 512, MANY, activation="gelu_tanh", ordered=True),
        *(
            Kernel(name, 2, 64, 512, replace(MANY, block_t=tile, smallest_t=tile // 4), short=True)
            for name in ("packed4-g128", "packed4-g32", "packed4-g128-asym")
            for tile in (32, 64, 128)
        ),
    ]


def given_kernels() -> list[Kernel]:
    """What layers of `LAYERS` in `FORMATS` get, for any number of tokens; K is six stages instead of theirs."""
    found: dict[Kernel, None] = {}
    layers = [*product_of(FORMATS, LAYERS), *product_of(["packed4-g128"], LAYERS[:2])]
    for name, (experts, top_k, hidden, intermediate) in layers:
        sizes, short = ((2, intermediate, hidden), (1, hidden, intermediate)), name.startswith("packed")
        made = [empty_weights(name, halves, n, k, experts, "meta") for halves, n, k in sizes]
        weights = [replace(one, short_scales=short) for one in made]
        for tokens, pick in product_of([2**i for i in range(17)], (config_for, pinned_config)):
            *configs, chained = pick(weights[0], weights[1], tokens, top_k)
            for (halves, _, _), config in zip(sizes, configs, strict=True):
                k = config.block_k * config.parts * 6
                kernel = Kernel(name, halves, config.rows // halves, k, config, False, chained, short=short)
                found[kernel] = None
    return list(found)


def kernels() -> dict[str, Kernel]:
    """All of them by name; also with rows set aside before the activation, or with the fold of a single row."""
    found = [*tuned_kernels(), *other_kernels(), *given_kernels()]
    gated = [kernel for kernel in found if kernel.halves == 2 and kernel.activation is not None]
    aside = [replace(kernel, aside=True) for kernel in gated if not kernel.single]
    folds = [replace(kernel, expand=True) for kernel in found if kernel.single and kernel.config.parts == 1]
    return {kernel.name: kernel for kernel in [*found, *aside, *folds]}


def compiled(kernel: Kernel) -> Resources:
    """What it takes and does."""
    weights = empty_weights(kernel.format, kernel.halves, kernel.n, kernel.k)
    extra: dict[str, torch.Tensor] = {"bias": torch.zeros(1, kernel.halves, kernel.n)} if kernel.bias else {}
    extra |= {"order": torch.zeros(1, kernel.k, dtype=torch.int32)} if kernel.ordered else {}
    weights = replace(weights, short_scales=kernel.short, **extra)
    check_config("compile", kernel.config, weights, kernel.halves == 2)
    config, rows = kernel.config, 16
    if kernel.single:
        items = torch.zeros(rows, dtype=torch.int32)
        work = WorkItems(items, items, rows, 1, True, 1)
    else:
        items = torch.zeros(rows // config.block_t + 1, dtype=torch.int64)
        work = WorkItems(
            items, torch.zeros(len(items), config.block_t, dtype=torch.int32), rows, config.block_t, False, 1
        )
    columns = kernel.n * (kernel.halves if kernel.activation is None else 1)
    y = torch.zeros(rows, columns, dtype=kernel.dtype)
    if config.parts > 1:
        y = torch.zeros(config.parts, rows, kernel.n)
    x = torch.zeros(rows, kernel.k, dtype=kernel.dtype)
    top_k = 8 if kernel.halves == 2 else None
    activation = None if top_k is None or kernel.activation is None else Activation(kernel.activation)
    aside = None
    if kernel.aside:
        aside = Aside(x.new_zeros((rows, kernel.n * kernel.halves)), torch.zeros(2, dtype=torch.int32), 4, 8)
    expand = None
    if kernel.expand:
        entries = torch.zeros(kernel.halves, 4, 1, dtype=torch.int64)
        table = AdapterTable(entries, entries, entries.float(), entries.int(), kernel.k, kernel.n, 16, kernel.dtype)
        expand = Expand(x.new_zeros((kernel.halves, rows, 16)), table, torch.zeros(2, dtype=torch.int32), 8)
    arguments = launch_arguments(x, weights, work, y, config, kernel.chained, top_k, activation, aside, expand)
    return compile_launch(product.grouped_int4_sm90, arguments, "sm_90", kernel.name)


def empty_weights(name: str, halves: int, n: int, k: int, experts: int = 1, device: str = "cpu") -> FragmentWeights:
    """Without values, padded as `prepare` pads them."""
    fmt = WeightFormat.parse(name)
    slabs, tiles = (-(-size // 128) * 2 for size in (n * halves, k))
    words = torch.zeros(experts, slabs, tiles, 512, dtype=torch.int32, device=device)
    if fmt.kind in ("nvfp4", "mxfp4"):
        scales = words.new_zeros((experts, slabs, tiles, 64), dtype=SCALES[fmt.group_size])
        scale = words.new_zeros((experts, halves), dtype=torch.float32)
        return FragmentWeights(fmt, n, k, halves, words, scales, global_scale=scale)
    scales = words.new_zeros((experts, slabs, tiles * 64 // fmt.group_size, 64), dtype=torch.float16)
    return FragmentWeights(fmt, n, k, halves, words, scales, None if fmt.symmetric else scales.to(torch.uint8))
