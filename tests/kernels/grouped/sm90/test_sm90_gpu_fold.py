"""The fold behind the Hopper product of single rows on a GPU: the bits of the product, then the fold's own kernels."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from sm90_compiling import FEW, MANY
from sm90_jobs import to_device, with_bias
from sm90_layers import TOP_K
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.grouped.sm90.config import Sm90Config, misfits
from fanfold.kernels.grouped.sm90.prepare import prepare_layer
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.spec import Activation, ExpertWeights
from fanfold.spec.activation import ActivationKind
from fanfold.spec.adapters import AdapterRows, Expand, xa_columns
from graphs import dirty_memory, same_bits
from samples import random_projection

sys.path.insert(0, str(Path(__file__).parents[2] / "lora"))
from lora_cases import Batch, Layer, make_layer, random_bank, random_batch

pytestmark = pytest.mark.gpu

E, SLOTS, H, INNER = 5, 6, 512, 384
RANKS = [(16,), (3, 8, 12, 16), (1, 24, 32), (16, 48, 100), (512, 64)]
CONFIGS = [
    FEW,
    MANY,
    replace(MANY, block_t=128, smallest_t=32),
    replace(MANY, block_t=128, smallest_t=64, warpgroups=2),
]


@dataclass
class Case:
    """A layer, its adapters and a batch."""

    up: FragmentWeights
    down: FragmentWeights
    first: Layer
    second: Layer
    batch: Batch
    x: Tensor
    h: Tensor


def case_of(
    name: str,
    tokens: int,
    ranks: tuple[int, ...] = (3, 16),
    dtype: torch.dtype = torch.bfloat16,
    halves: int = 2,
    slots: int = SLOTS,
    there: float = 0.8,
    table_experts: int = E,
) -> Case:
    packed = random_projection(name, E, halves, INNER, H), random_projection(name, E, 1, H, INNER, seed=7)
    up, down = prepare_layer(ExpertWeights(*(to_device(with_bias(one), "cuda") for one in packed)))
    most = max(ranks)
    sizes = ((halves, INNER, H), (1, H, INNER))
    first, second = (
        make_layer(
            [random_bank(slots, table_experts, n, k, ranks, 3 * n + p, dtype, there) for p in range(parts)],
            *(slots, table_experts, n, k, most, dtype, "cuda"),
        )
        for parts, n, k in sizes
    )
    given = random_batch(tokens, TOP_K, E, slots, "cuda", seed=tokens)
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator, device="cuda").to(dtype)
    h = torch.randn(tokens * TOP_K, INNER, generator=generator, device="cuda").to(dtype)
    return Case(up, down, first, second, given, x, h)


def expand_of(layer: Layer, x: Tensor, source: AdapterRows, adapters: Tensor, gather_x: bool) -> Expand:
    """xa by the fold's own kernel, among values that are not numbers."""
    from fanfold.kernels.lora.launch import shrink

    rows, table = source.expert_ids.numel(), layer.table
    xa = torch.full((table.projections, rows, xa_columns(table.max_rank)), torch.nan, dtype=x.dtype, device="cuda")
    shrink("test", x, table, source, xa, gather_x=gather_x)
    return Expand(xa, table, adapters, TOP_K)


def configs_of(weights: FragmentWeights, gate_up: bool) -> list[Sm90Config]:
    return [
        config
        for config in CONFIGS
        if not misfits(config, weights.format, weights.rows, weights.padded_k, gate_up)
        and not (config.scale_on_sum and weights.fp4_group)
    ]


def check(case: Case, activation: Activation, changes: bool = True) -> None:
    """Every config, against launches without adapters and the fold's kernels behind them."""
    from fanfold.kernels.activation.activate import activate
    from fanfold.kernels.grouped.sm90.items import single_items
    from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
    from fanfold.kernels.lora.launch import fold_down, fold_gate_up

    ids, adapters = case.batch.ids, case.batch.adapters
    work, source = single_items(ids, E), AdapterRows(ids.flatten(), adapters, TOP_K)
    here = (ids.flatten() >= 0) & (ids.flatten() < E)
    tried = configs_of(case.up, True), configs_of(case.down, False)
    assert min(map(len, tried)) >= 2
    for config in tried[0]:
        product = case.x, case.up, work, TOP_K, config
        plain = grouped_gate_up(*product, None)
        y1 = fold_gate_up(plain.clone(), case.x, case.first.table, source)[here]
        expand = expand_of(case.first, case.x, source, adapters, True)
        dirty_memory("cuda")
        assert same_bits(grouped_gate_up(*product, None, expand=expand)[here], y1), config.name
        dirty_memory("cuda")
        h = grouped_gate_up(*product, activation, expand=expand)[here]
        assert same_bits(h, activate(y1, activation)), config.name
        assert changes != same_bits(y1, plain[here])
    for config in tried[1]:
        y2 = grouped_down(case.h, case.down, work, config)
        wanted = fold_down(y2.clone(), case.h, case.second.table, source)
        expand = expand_of(case.second, case.h, source, adapters, False)
        dirty_memory("cuda")
        assert same_bits(grouped_down(case.h, case.down, work, config, expand=expand)[here], wanted[here]), config.name


@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_ranks(ranks: tuple[int, ...]) -> None:
    check(case_of("gptq4-g64", 20, ranks), Activation())


@pytest.mark.parametrize("name", ["gptq4-g128-asym-v1", "gptq4-g32", "gptq4-g64-actorder", "nvfp4", "mxfp4"])
def test_formats(name: str) -> None:
    check(case_of(name, 9), Activation())


@pytest.mark.parametrize("kind", ["gelu_tanh", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_activations_and_dtypes(kind: ActivationKind, dtype: torch.dtype) -> None:
    activation = Activation(kind, alpha=1.3, limit=1.5)
    check(case_of("gptq4-g64", 9, dtype=dtype, halves=2 if activation.gated else 1), activation)


@pytest.mark.parametrize(("there", "table_experts"), [(0.4, E), (1.0, 3)])
def test_pairs_that_are_missing(there: float, table_experts: int) -> None:
    """Gate without up and the other way round, experts beyond the table, ids of the base and beyond the slots."""
    check(case_of("gptq4-g64", 40, slots=40, there=there, table_experts=table_experts), Activation())


def test_adapters_without_pairs_change_no_bit() -> None:
    """Zeros keep their sign too: y is 0 and -0 where weights are."""
    case = case_of("gptq4-g64", 9)
    case.first.table.a.zero_()
    case.second.table.a.zero_()
    for part in (case.up.scales, case.up.bias):
        assert part is not None
        part.zero_()
    check(case, Activation(), changes=False)


def test_a_plan_is_refused() -> None:
    from fanfold.kernels.grouped.sm90.launch import grouped_down
    from fanfold.routing.plan import plan_items

    case = case_of("gptq4-g64", 9)
    ids, adapters = case.batch.ids, case.batch.adapters
    expand = expand_of(case.second, case.h, AdapterRows(ids.flatten(), adapters, TOP_K), adapters, False)
    _, work = plan_items(ids, E, MANY.block_t)
    with pytest.raises(ArgumentError, match="expand: found work items of up to 64 rows; expected single rows"):
        grouped_down(case.h, case.down, work, MANY, expand=expand)
