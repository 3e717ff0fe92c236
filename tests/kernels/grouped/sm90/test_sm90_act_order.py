"""Act-order: K sorted by group at load, h in the order that down reads; what is refused, by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sm90_jobs import unpacked, with_bias
from torch import Tensor

from fanfold.errors import UnsupportedError
from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.grouped.sm90.prepare import prepare_layer
from fanfold.routing.reference import plan_sort, work_items
from fanfold.spec import ExpertWeights, ProjectionWeights
from fanfold.spec.work import WorkItems
from samples import random_projection


def layer(name: str = "gptq4-g64-asym-v1-actorder") -> ExpertWeights:
    return ExpertWeights(
        with_bias(random_projection(name, 3, 2, 192, 128)), with_bias(random_projection(name, 3, 1, 128, 192, 7))
    )


@pytest.mark.parametrize(
    "name", ["gptq4-g64-asym-v1-actorder", "gptq4-g32-actorder", "packed4-g64-asym-actorder", "gptq4-g64", "mxfp4"]
)
def test_weights_are_those_of_the_file_in_their_orders(name: str) -> None:
    weights = layer(name)
    gate_up, down = prepare_layer(weights)
    assert gate_up.bias is not None
    assert weights.gate_up.bias is not None
    ordered = weights.gate_up.format.act_order
    for made in (gate_up.order, gate_up.hidden_order, down.hidden_order):
        assert (made is not None) == ordered
    assert down.order is None
    for e in range(3):
        order = gate_up.order[e].long() if gate_up.order is not None else slice(None)
        hidden = gate_up.hidden_order[e].long() if gate_up.hidden_order is not None else slice(None)
        values, scales = unpacked(gate_up, e)
        for half in range(2):
            expected = dequantize_expert(weights.gate_up, e, half)
            assert torch.equal((values * scales)[half], expected[hidden][:, order])
            assert torch.equal(gate_up.bias[e, half], weights.gate_up.bias[e, half].float()[hidden])
        values, scales = unpacked(down, e)
        assert torch.equal((values * scales)[0], dequantize_expert(weights.down, e, 0)[:, hidden])


def test_the_sorts_are_stable_and_each_experts_own() -> None:
    weights = layer()
    gate_up, _ = prepare_layer(weights)
    assert gate_up.order is not None
    assert gate_up.hidden_order is not None
    g_idx = weights.gate_up.tensors["g_idx"][:, 0]
    for e in range(3):
        assert torch.equal(gate_up.order[e].long(), torch.argsort(g_idx[e], stable=True))
    assert not torch.equal(gate_up.hidden_order[0], gate_up.hidden_order[1])


def with_g_idx(weights: ProjectionWeights, g_idx: Tensor) -> ProjectionWeights:
    return replace(weights, tensors={**weights.tensors, "g_idx": g_idx})


def test_gate_and_up_of_other_orders() -> None:
    weights = layer()
    g_idx = weights.gate_up.tensors["g_idx"].clone()
    g_idx[2, 1] = g_idx[2, 1].flip(0)
    with pytest.raises(UnsupportedError, match="gate unlike that of up, in 1 experts, the first 2"):
        prepare_layer(replace(weights, gate_up=with_g_idx(weights.gate_up, g_idx)))


def test_groups_that_are_not_full() -> None:
    weights = layer()
    g_idx = weights.down.tensors["g_idx"].clone()
    g_idx[1, 0, 5] = (g_idx[1, 0, 5] + 1) % 3
    with pytest.raises(UnsupportedError, match="down on sm_90: found groups of other sizes in 1 experts, the first 1"):
        prepare_layer(replace(weights, down=with_g_idx(weights.down, g_idx)))


@pytest.mark.parametrize(("tokens", "tile", "k"), [(1, 8, 64), (33, 16, 192), (70, 64, 320)])
def test_rows_of_x_in_the_order_of_their_expert(tokens: int, tile: int, k: int, device: str) -> None:
    from fanfold.kernels.grouped.sm90.reorder import reorder

    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 6, (tokens, 3), generator=generator, dtype=torch.int32).to(device)
    x = torch.randn(tokens, k, generator=generator).half().to(device)
    order = torch.stack([torch.randperm(k, generator=generator) for _ in range(5)]).int().to(device)
    route = plan_sort(ids, 5)
    found = reorder(x, order, work_items(route, tile), 3)
    for position, row in enumerate(route.sorted_rows.tolist()):
        expert = int(ids.flatten()[row])
        if 0 <= expert < 5:
            assert torch.equal(found[position], x[row // 3][order[expert].long()])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_single_rows(dtype: torch.dtype, device: str) -> None:
    from fanfold.kernels.grouped.sm90.reorder import reorder

    generator = torch.Generator().manual_seed(3)
    ids = torch.tensor([3, -1, 0, 5, 2, 2], dtype=dtype, device=device)
    if dtype == torch.int64:
        ids[3] = 2**32 + 1  # in range once narrowed
    x = torch.randn(2, 128, generator=generator).half().to(device)
    order = torch.stack([torch.randperm(128, generator=generator) for _ in range(5)]).int().to(device)
    found = reorder(x, order, WorkItems(ids, ids, 6, 1, True, 5), 3)
    for row, expert in enumerate(ids.tolist()):
        if 0 <= expert < 5:
            assert torch.equal(found[row], x[row // 3][order[expert].long()])
