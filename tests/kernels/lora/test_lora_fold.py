"""The fold in Triton against the reference: in the interpreter (fp16), on a GPU (bf16 and fp16)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from lora_cases import (
    Batch,
    Layer,
    check_close,
    expected,
    make_layer,
    plan,
    random_bank,
    random_batch,
    random_pair,
    single,
    write,
)
from torch import Tensor

from fanfold.kernels.activation.reference import activate
from fanfold.spec import Activation
from fanfold.spec.adapters import AdapterRows
from graphs import poison, same_bits

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SLOW = [pytest.mark.gpu]  # in the interpreter
T, TOP_K, E, SLOTS, K, N = 5, 2, 3, 2, 96, 72
R = T * TOP_K


def random_values(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def layer_of(
    dtype: torch.dtype,
    device: str,
    ranks: tuple[int, ...] = (1, 3, 8, 12, 16),
    projections: int = 2,
    there: float = 0.8,
) -> Layer:
    banks = [random_bank(SLOTS, E, N, K, ranks, seed, dtype, there) for seed in range(projections)]
    return make_layer(banks, SLOTS, E, N, K, max(ranks), dtype, device)


def sources(batch: Batch, layer: Layer) -> dict[str, Any]:
    """Name -> rows; all but "natural" have y in sorted order."""
    tiles = {f"tile {tile}": plan(batch, layer, tile) for tile in (8, 16)}
    return {**tiles, "sorted": single(batch, True), "natural": single(batch, False)}


def gate_up(layer: Layer, source: Any, y: Tensor, x: Tensor, **options: Any) -> Tensor:
    from fanfold.kernels.lora.launch import fold_gate_up

    return fold_gate_up(y.clone(), x, layer.table, source, **options)


def down(layer: Layer, source: Any, y: Tensor, h: Tensor, **options: Any) -> Tensor:
    from fanfold.kernels.lora.launch import fold_down

    return fold_down(y.clone(), h, layer.table, source, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a3_a12_a15_a17_a18_every_path_gives_the_bits_of_the_others(dtype: torch.dtype, device: str) -> None:
    """Unlike ranks, gate A != up A, pairs and halves that are missing, ids of no expert and of no slot."""
    layer, batch = layer_of(dtype, device), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=dtype, device=device)
    y = random_values(R, 2 * N, dtype=dtype, device=device, seed=1)
    at_positions = batch.at_positions(y)
    wanted = expected(layer, batch, at_positions, x, True, True)
    assert not torch.equal(wanted, at_positions)
    for name, source in sources(batch, layer).items():
        found = gate_up(layer, source, y if name == "natural" else at_positions, x)
        found = batch.at_positions(found) if name == "natural" else found
        check_close(found, wanted)
        if name == "tile 8":
            first = found
        assert same_bits(found, first), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_down_reads_h_at_positions_and_may_write_to_rows(dtype: torch.dtype, device: str) -> None:
    layer, batch = layer_of(dtype, device, projections=1), random_batch(T, TOP_K, E, SLOTS, device)
    h = random_values(R, K, dtype=dtype, device=device)
    y = random_values(R, N, dtype=dtype, device=device, seed=1)
    wanted = expected(layer, batch, y, h, False, True)
    work = plan(batch, layer)
    found = down(layer, work, y, h)
    check_close(found, wanted)
    of_rows = torch.empty_like(y)
    of_rows[batch.route.sorted_rows.long()] = y
    for source in (work, single(batch, True)):
        assert same_bits(batch.at_positions(down(layer, source, of_rows, h, scatter=True)), found)


@pytest.mark.parametrize("rank", [16, 40])
def test_down_in_parts_has_the_bits_of_their_rounded_sum(rank: int, device: str) -> None:
    """Base rows and rows without a pair keep their parts, bit for bit."""
    layer = layer_of(torch.float16, device, (3, rank), projections=1)
    batch = random_batch(T, TOP_K, E, SLOTS, device)
    h = random_values(R, K, dtype=torch.float16, device=device)
    parts = random_values(3, R, N, dtype=torch.float32, device=device, seed=1)
    y = ((parts[0] + parts[1]) + parts[2]).half()
    for source in sources(batch, layer).values():
        folded = down(layer, source, y, h)
        found = down(layer, source, parts, h)
        changed = (folded != y).any(1)
        assert 0 < changed.sum() < R
        assert same_bits(found[0][changed], folded[changed].float())
        assert not found[1:, changed].any()
        assert same_bits(found[:, ~changed], parts[:, ~changed])


@pytest.mark.parametrize(
    "rank", [1, 12, 48, 100, *(pytest.param(r, marks=SLOW) for r in (3, 8, 16, 32, 64, 128, 256, 512))]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a10_a12_ranks(rank: int, dtype: torch.dtype, device: str) -> None:
    """Beside a rank of 1 in the same batch."""
    g = torch.Generator().manual_seed(rank)
    banks = [{(s, 0): random_pair(N, K, (rank, 1)[s], g, dtype) for s in range(2)} for _ in range(2)]
    layer = make_layer(banks, 2, 1, N, K, rank, dtype, device)
    batch = random_batch(3, 1, 1, 2, device, odd_ids=False)
    batch = replace(batch, adapters=torch.tensor([0, 1, -1], dtype=torch.int32, device=device))
    x = random_values(3, K, dtype=dtype, device=device)
    y = random_values(3, 2 * N, dtype=dtype, device=device, seed=1)
    found = gate_up(layer, single(batch, True), y, x)
    check_close(found, expected(layer, batch, y, x, True, True))
    assert same_bits(found[2], y[2])
    if device == "cuda":
        assert same_bits(gate_up(layer, plan(batch, layer), y, x), found)


@pytest.mark.parametrize(
    ("kind", "max_rank"),
    [
        ("silu", 40),
        ("relu2", 16),
        *(pytest.param(kind, rank, marks=SLOW) for kind in ("gelu_tanh", "clamped_swiglu") for rank in (16, 40)),
        pytest.param("silu", 16, marks=SLOW),
        pytest.param("relu2", 40, marks=SLOW),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_activation_behind_the_fold_gives_the_bits_of_two_steps(
    kind: Any, max_rank: int, dtype: torch.dtype, device: str
) -> None:
    from fanfold.kernels.activation.activate import activate as two_steps

    activation = Activation(kind)
    projections = 2 if activation.gated else 1
    layer = layer_of(dtype, device, (3, max_rank), projections)
    batch = random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=dtype, device=device)
    y = random_values(R, projections * N, dtype=dtype, device=device, seed=1)
    source = plan(batch, layer) if max_rank == 40 else single(batch, True)
    folded = gate_up(layer, source, y, x)
    h = torch.full((R, N), 7.0, dtype=dtype, device=device)
    gate_up(layer, source, y, x, activation=activation, h=h)
    used = batch.route.expert_offsets[-1]
    adapters = batch.adapters[(batch.route.sorted_rows // TOP_K).long()][:used]
    adapted = (adapters >= 0) & (adapters < SLOTS)
    assert (h[:used][~adapted] == 7).all()
    assert same_bits(h[:used][adapted], two_steps(folded, activation)[:used][adapted])
    torch.testing.assert_close(h[:used][adapted], activate(folded, activation)[:used][adapted], rtol=2e-2, atol=1e-3)
    assert not torch.equal(folded[:used][adapted], y[:used][adapted])


@pytest.mark.parametrize("planned", [True, False])
def test_promise_b_windows_cover_the_whole_bit_for_bit(planned: bool, device: str) -> None:
    """A scratch of 5 rows, with NaN in it, and windows that cut tiles."""
    from fanfold.kernels.lora.launch import expand, shrink
    from fanfold.kernels.lora.sizes import windows

    dtype = torch.float16
    layer, batch = layer_of(dtype, device), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=dtype, device=device)
    y = random_values(R, 2 * N, dtype=dtype, device=device, seed=1)
    source = plan(batch, layer) if planned else single(batch, True)
    found = y.clone()
    xa = torch.empty(2, 5, 24, dtype=dtype, device=device)
    for start, end in [(3, 3), (9, 2), *windows(R, 5)]:
        poison(xa)
        shrink("shrink", x, layer.table, source, xa, gather_x=True, row_offset=start, row_end=end)
        expand("expand", found, layer.table, source, xa, row_offset=start, row_end=end)
        assert same_bits(found[end:], y[end:]) or end < start
    assert same_bits(found, gate_up(layer, source, y, x))


def test_promises_a_c_d_f_a_row_depends_on_nothing_but_itself(device: str) -> None:
    layer, batch = layer_of(torch.float16, device), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=torch.float16, device=device)
    y = random_values(R, 2 * N, dtype=torch.float16, device=device, seed=1)
    y[:, ::7] = torch.nan
    found = gate_up(layer, plan(batch, layer), y, x)
    assert same_bits(gate_up(layer, plan(batch, layer), y, x), found)
    token = batch.route.sorted_rows.long() // TOP_K
    base = (batch.adapters < 0) | (batch.adapters >= SLOTS)
    assert same_bits(found[base[token]], y[base[token]])
    for kept in (2, 4):
        others = torch.where(torch.arange(T, device=device) == kept, batch.adapters, (batch.adapters + 2) % SLOTS)
        mixed = gate_up(layer, plan(replace(batch, adapters=others.int()), layer), y, x)
        assert same_bits(mixed[token == kept], found[token == kept])
    alone = replace(batch, ids=batch.ids[4:5], adapters=batch.adapters[4:5])
    of_rows = torch.empty_like(y)
    of_rows[batch.route.sorted_rows.long()] = y
    found_of_rows = torch.empty_like(y)
    found_of_rows[batch.route.sorted_rows.long()] = found
    assert same_bits(gate_up(layer, single(alone, False), of_rows[8:10], x[4:5]), found_of_rows[8:10])


def test_a1_a2_a24_ids_of_the_base_leave_every_bit(device: str) -> None:
    layer, batch = layer_of(torch.float16, device, there=1.0), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=torch.float16, device=device)
    y = random_values(R, 2 * N, dtype=torch.float16, device=device, seed=1)
    batch = replace(batch, adapters=torch.full_like(batch.adapters, -1))
    for source in (plan(batch, layer), single(batch, True)):
        assert same_bits(gate_up(layer, source, y, x), y)


def test_ids_beyond_the_slots_are_the_base_and_counted_once_a_token(device: str) -> None:
    layer, batch = layer_of(torch.float16, device), random_batch(T, TOP_K, E, SLOTS, device)
    ids = torch.tensor([SLOTS, -(2**31), 2**31 - 1, 0, SLOTS + 5], dtype=torch.int32, device=device)
    batch = replace(batch, adapters=ids)
    x = random_values(T, K, dtype=torch.float16, device=device)
    y = random_values(R, 2 * N, dtype=torch.float16, device=device, seed=1)
    unknown = torch.zeros(1, dtype=torch.int32, device=device)
    found = gate_up(layer, plan(batch, layer), y, x)
    assert same_bits(gate_up(layer, single(batch, True), y, x, unknown=unknown), found)
    assert unknown.item() == 3
    token = batch.route.sorted_rows.long() // TOP_K
    assert same_bits(found[token != 3], y[token != 3])


def test_one_adapter_for_every_row(device: str) -> None:
    layer, batch = layer_of(torch.float16, device), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=torch.float16, device=device)
    y = random_values(R, 2 * N, dtype=torch.float16, device=device, seed=1)
    named = replace(batch, adapters=torch.full_like(batch.adapters, 1))
    wanted = gate_up(layer, single(named, True), y, x)
    rows = AdapterRows(batch.ids.flatten(), None, TOP_K, batch.route.sorted_rows, one_slot=1)
    assert same_bits(gate_up(layer, rows, y, x), wanted)
    assert not torch.equal(wanted, y)


def test_a21_one_projection_one_expert_a_short_table_and_shared_addresses(device: str) -> None:
    """Slot 0 has gate alone with one A for all experts, slot 1 up of expert 1 alone; expert 2 is behind the table."""
    dtype = torch.float16
    g = torch.Generator().manual_seed(3)
    shared = random_pair(N, K, 5, g, dtype)
    gate = {(0, e): replace(random_pair(N, K, 5, g, dtype), a=shared.a) for e in range(2)}
    layer = make_layer([gate, {(1, 1): random_pair(N, K, 9, g, dtype)}], SLOTS, 2, N, K, 16, dtype, device)
    layer.table.a[0, 0] = layer.table.a[0, 0, 0].clone()
    batch = random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=dtype, device=device)
    y = random_values(R, 2 * N, dtype=dtype, device=device, seed=1)
    for source in (plan(batch, layer), single(batch, True)):
        check_close(gate_up(layer, source, y, x), expected(layer, batch, y, x, True, True))


def test_entries_change_in_place(device: str) -> None:
    dtype = torch.float16
    layer, batch = layer_of(dtype, device), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=dtype, device=device)
    y = random_values(R, 2 * N, dtype=dtype, device=device, seed=1)
    before = gate_up(layer, single(batch, True), y, x)
    write(layer, 0, 0, {e: random_pair(N, K, 7, torch.Generator().manual_seed(e), dtype) for e in range(E)})
    write(layer, 1, 0, {})
    found = gate_up(layer, single(batch, True), y, x)
    assert not torch.equal(found, before)
    check_close(found, expected(layer, batch, y, x, True, True))


def test_more_than_4096_pairs_of_slot_and_expert(device: str) -> None:
    dtype, slots, experts = torch.float16, 64, 70
    g = torch.Generator().manual_seed(3)
    bank = {(slot, expert): random_pair(N, K, 2, g, dtype) for slot, expert in ((63, 69), (0, 0), (63, 0), (0, 69))}
    layer = make_layer([bank], slots, experts, N, K, 8, dtype, device)
    batch = random_batch(4, 2, experts, slots, device, odd_ids=False)
    ids = torch.tensor([[69, 0], [0, 69], [69, 1], [68, 69]], dtype=torch.int32)
    batch = random_route(ids, torch.tensor([63, 0, 63, 62], dtype=torch.int32), experts, device)
    h = random_values(8, K, dtype=dtype, device=device)
    y = random_values(8, N, dtype=dtype, device=device, seed=1)
    wanted = expected(layer, batch, y, h, False, True)
    for source in (plan(batch, layer), single(batch, True)):
        found = down(layer, source, y, h)
        check_close(found, wanted)
        assert int((found != y).any(1).sum()) == 5


def random_route(ids: Tensor, adapters: Tensor, experts: int, device: str) -> Batch:
    from fanfold.routing.reference import plan_sort

    return Batch(ids.to(device), adapters.to(device), plan_sort(ids.to(device), experts))


def test_fp32_activations(device: str) -> None:
    layer, batch = layer_of(torch.float32, device), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K, dtype=torch.float32, device=device)
    y = random_values(R, 2 * N, dtype=torch.float32, device=device, seed=1)
    wanted = expected(layer, batch, y, x, True, True)
    for source in (plan(batch, layer), single(batch, True)):
        torch.testing.assert_close(gate_up(layer, source, y, x), wanted, rtol=1e-5, atol=1e-5)


def test_rows_may_be_strided_and_none(device: str) -> None:
    layer, batch = layer_of(torch.float16, device), random_batch(T, TOP_K, E, SLOTS, device)
    x = random_values(T, K + 8, dtype=torch.float16, device=device)[:, :K]
    y = random_values(R, 2 * N + 8, dtype=torch.float16, device=device, seed=1)[:, : 2 * N]
    from fanfold.kernels.lora.launch import fold_gate_up

    wanted = expected(layer, batch, y, x, True, True)
    check_close(fold_gate_up(y, x, layer.table, single(batch, True)), wanted)
    nothing = random_batch(0, TOP_K, E, SLOTS, device)
    for source in (plan(nothing, layer), single(nothing, True)):
        h = y[:0, :N].contiguous()
        assert gate_up(layer, source, y[:0], x[:0], activation=Activation("silu"), h=h) is h
