"""Bits of the Hopper product on a GPU: fused and unfused, run to run, in graphs, in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sm90_compiling import FEW, MANY
from sm90_jobs import integers, projection, to_device, with_bias
from sm90_layers import (
    EXPERTS,
    TOP_K,
    Layer,
    batch,
    configs,
    integer_layer,
    layer_of,
    reference,
    run,
)
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.grouped.sm90.configs import fit, pinned_config
from fanfold.kernels.grouped.sm90.prepare import prepare, prepare_layer
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.spec import Activation, ExpertWeights
from fanfold.spec.activation import ActivationKind
from fanfold.spec.adapters import Aside
from graphs import check_replays, same_bits
from samples import random_projection, relative_error

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def random_layer() -> Layer:
    return integer_layer(exact=False)


@pytest.mark.parametrize("order", ["", "-actorder"])
@pytest.mark.parametrize("kind", ["silu", "relu2"])
@pytest.mark.parametrize("tokens", [2, 9, 400])
def test_rows_with_an_adapter_are_set_aside(tokens: int, kind: ActivationKind, order: str) -> None:
    """Their y1 has the bits of a launch without activation; other rows go into h, those of ids beyond the slots too."""
    from fanfold.kernels.grouped.sm90.launch import grouped_gate_up
    from fanfold.routing.plan import plan_items

    activation = Activation(kind)
    halves = 2 if activation.gated else 1
    name = "gptq4-g64" + order
    packed = random_projection(name, 5, halves, 320, 448), random_projection(name, 5, 1, 448, 320, seed=7)
    weights = prepare_layer(ExpertWeights(*(to_device(one, "cuda") for one in packed)))[0]
    for config in (FEW, replace(MANY, block_k=64)):
        config = fit(config, (weights.format, weights.rows, weights.padded_k), True)
        x, ids, _ = batch(tokens, torch.bfloat16, 5, k=448)
        route, work = plan_items(ids, 5, config.block_t)
        end = int(route.expert_offsets[-1])
        rows = route.sorted_rows
        plain = (x, weights, work, TOP_K, config)
        y1, h = grouped_gate_up(*plain, None), grouped_gate_up(*plain, activation)
        for slots in ([-1, 4], [2, 3], [-1, 0, 2, 4]):
            adapters = torch.tensor(slots, device="cuda").int().repeat(tokens)[:tokens].contiguous()
            aside = Aside(torch.full_like(y1, 7.0), adapters, 4, TOP_K)
            found = grouped_gate_up(*plain, activation, aside=aside)
            adapted = ((adapters >= 0) & (adapters < 4))[rows[:end].long() // TOP_K]
            assert same_bits(aside.y1[:end][adapted], y1[:end][adapted])
            assert (aside.y1[:end][~adapted] == 7).all()
            assert same_bits(found[:end][~adapted], h[:end][~adapted])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["packed4-g128", "packed4-g32", "packed4-g64-asym"])
def test_short_scales_take_fewer_instructions_to_the_same_bits(name: str, dtype: torch.dtype) -> None:
    layer = layer_of([integers(name, 5, p, n, k) for p, n, k in ((2, 512, 1024), (1, 1024, 512))])
    assert layer.gate_up.short_scales
    assert layer.down.short_scales
    long = replace(
        layer,
        gate_up=replace(layer.gate_up, short_scales=False),
        down=replace(layer.down, short_scales=False),
    )
    for config in (MANY, replace(MANY, block_t=128, smallest_t=32)):
        for tokens in (3, 70, 400):
            given = batch(tokens, dtype, 5)
            here = given[1].flatten() < 5
            one, other = (run(made, given, config, config) for made in (layer, long))
            assert same_bits(one[0][here], other[0][here])
            assert same_bits(one[1][here], other[1][here])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
def test_fused_activations_give_the_bits_of_two_steps(kind: ActivationKind, dtype: torch.dtype) -> None:
    from fanfold.kernels.activation.activate import activate as activate_on_gpu
    from fanfold.kernels.grouped.sm90.launch import grouped_gate_up
    from fanfold.routing.plan import plan_items

    activation = Activation(kind, alpha=1.3, limit=1.5)
    halves = 2 if activation.gated else 1
    packed = to_device(with_bias(integers("gptq4-g64-asym-v1", 5, halves, 320, 448)), "cuda")
    weights = prepare(packed)
    for config in (FEW, replace(MANY, block_k=64)):
        config = fit(config, (weights.format, weights.rows, weights.padded_k), True)
        for tokens in (9, 400):
            x, ids, _ = batch(tokens, dtype, 5, k=448)
            x *= 4
            route, work = plan_items(ids, 5, config.block_t)
            end = int(route.expert_offsets[-1])
            y1 = grouped_gate_up(x, weights, work, TOP_K, config, None)[:end]
            h = grouped_gate_up(x, weights, work, TOP_K, config, activation)[:end]
            assert y1.shape[1] == halves * 320
            assert same_bits(h, activate_on_gpu(y1, activation))
            for e in range(5):
                first, last = (int(route.expert_offsets[at]) for at in (e, e + 1))
                rows = route.sorted_rows[first:last].long() // TOP_K
                expected = torch.cat(
                    [
                        x[rows].float() @ dequantize_expert(packed, e, p).to(dtype).float().T
                        + packed.bias[e, p].float()
                        for p in range(halves)
                    ],
                    1,
                )
                if len(rows):
                    assert relative_error(y1[first:last], expected) < torch.finfo(dtype).eps


def test_single_rows_of_ids_out_of_range(random_layer: Layer) -> None:
    """int64 ids that are in range once narrowed; the others give the bits of int32 ids."""
    row = next(row for row in read_table() if row.tokens == 1)
    x, ids, weights = batch(3, torch.bfloat16, EXPERTS)
    ids[:, 0] = torch.tensor([0, 3, 1], device="cuda")
    ids[:, 1] = torch.tensor([-1, EXPERTS, 1], device="cuda")
    expected = run(random_layer, (x, ids, weights), row.gate_up, row.down, single=True)[2]
    wide = ids.long()
    wide[0, 1], wide[1, 1] = -(2**40), 2**32 + 1
    found = run(random_layer, (x, wide, weights), row.gate_up, row.down, single=True)[2]
    assert same_bits(found, expected)
    assert relative_error(found, reference(random_layer, (x, ids, weights), False)) < 4e-3


@pytest.mark.parametrize("name", ["gptq4-g128", "gptq4-g32-asym-v2", "nvfp4", "mxfp4"])
def test_d7_pinned_configs_give_a_row_the_same_bits_in_any_batch(name: str) -> None:
    """Wherever the row lies: alone, in a tile of 8 or of 256, first or last, with or without a plan."""
    layer = layer_of([projection(name, 5, p, n, k) for p, n, k in ((2, 512, 1024), (1, 1024, 512))])
    x, ids, weights = batch(1500, torch.bfloat16, 5)
    _, y2, out = run(layer, (x, ids, weights), *pinned_config(layer.gate_up, layer.down, 1500, TOP_K)[:2])
    here = (ids < 5).flatten()
    for tokens in (1, 2, 7, 60, 333, 1500):
        for shift in (0, 700):
            at = (torch.arange(tokens, device="cuda") * 7 + shift) % 1500
            part = (x[at], ids[at], weights[at])
            pinned = pinned_config(layer.gate_up, layer.down, tokens, TOP_K)
            for single in (False, True) if tokens < 100 else (False,):
                found = run(layer, part, *pinned[:2], single=single)
                assert same_bits(found[2], out[at])
                rows = (at[:, None] * TOP_K + torch.arange(TOP_K, device="cuda")).flatten()
                assert same_bits(found[1][here[rows]], y2[rows][here[rows]])


def test_d7_configs_of_one_kind_give_the_same_bits(random_layer: Layer) -> None:
    """The kind is where scales are applied and in how many parts: tiles, stages and halves of tiles do not count."""
    given = batch(600, torch.bfloat16, EXPERTS)
    seen: dict[tuple[bool, bool, int], Tensor] = {}
    for gate_up, down in configs():
        kind = (gate_up.scale_on_sum, down.scale_on_sum, down.parts)
        out = run(random_layer, given, gate_up, down)[2]
        assert same_bits(out, seen.setdefault(kind, out))
    assert len(seen) >= 3


@pytest.mark.parametrize("tokens", [1, 64, 900])
@pytest.mark.parametrize("chained", [False, True])
def test_replays(tokens: int, chained: bool, random_layer: Layer) -> None:
    row = next(row for row in read_table() if row.tokens == (1 if tokens == 1 else 64 if tokens == 64 else 1024))
    batches = [batch(tokens, torch.bfloat16, EXPERTS, seed=seed) for seed in range(3)]
    check_replays(lambda *given: run(random_layer, given, row.gate_up, row.down, chained)[2:], batches)


def test_rows_of_no_expert_are_not_written(random_layer: Layer) -> None:
    row = next(row for row in read_table() if row.tokens == 64)
    x, ids, weights = batch(40, torch.bfloat16, EXPERTS)
    ids[::2] = -1
    ids[1::2] = EXPERTS
    out = run(random_layer, (x, ids, weights), row.gate_up, row.down)[2]
    assert torch.equal(out, torch.zeros_like(out))


def test_the_same_bits_from_run_to_run(random_layer: Layer) -> None:
    for row in read_table()[:6]:
        given = batch(200, torch.bfloat16, EXPERTS)
        first = run(random_layer, given, row.gate_up, row.down)[2]
        for _ in range(5):
            assert torch.equal(run(random_layer, given, row.gate_up, row.down)[2], first)
