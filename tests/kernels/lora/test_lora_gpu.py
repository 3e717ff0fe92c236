"""What only a GPU shows of the fold: graphs, exact sums, many rows, bits of bf16."""

from __future__ import annotations

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

from fanfold.routing.plan import plan_sort
from fanfold.spec import Activation, LoraPair
from graphs import poison, same_bits

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
E, TOP_K, K, N = 16, 4, 512, 384


def layer_of(slots: int, projections: int, ranks: tuple[int, ...] = (4, 16), n: int = N, k: int = K) -> Layer:
    banks = [random_bank(slots, E, n, k, ranks, seed, BF16, 0.9) for seed in range(projections)]
    return make_layer(banks, slots, E, n, k, max(ranks), BF16, "cuda")


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(BF16)


@pytest.mark.parametrize("tokens", [3, 60, 400])
@pytest.mark.parametrize("slots", [2, 40])
def test_tiles_and_single_rows_give_one_result(tokens: int, slots: int) -> None:
    from fanfold.kernels.lora.launch import fold_down, fold_gate_up

    gate_up, down, batch = layer_of(slots, 2), layer_of(slots, 1), random_batch(tokens, TOP_K, E, slots, "cuda")
    x, y1 = values(tokens, K), values(tokens * TOP_K, 2 * N, seed=1)
    h, y2 = values(tokens * TOP_K, K, seed=2), values(tokens * TOP_K, N, seed=3)
    found = [
        (fold_gate_up(y1.clone(), x, gate_up.table, source), fold_down(y2.clone(), h, down.table, source))
        for source in [*(plan(batch, gate_up, tile) for tile in (8, 16)), single(batch, True)]
    ]
    check_close(found[0][0], expected(gate_up, batch, y1, x, True, True))
    check_close(found[0][1], expected(down, batch, y2, h, False, True))
    for others in found[1:]:
        assert all(same_bits(a, b) for a, b in zip(others, found[0], strict=True))


def test_a30_runs_give_the_same_bits() -> None:
    from fanfold.kernels.lora.launch import fold_gate_up

    layer, batch = layer_of(4, 2), random_batch(500, TOP_K, E, 4, "cuda")
    x, y = values(500, K), values(2000, 2 * N, seed=1)
    first = fold_gate_up(y.clone(), x, layer.table, plan(batch, layer))
    for _ in range(30):
        assert same_bits(fold_gate_up(y.clone(), x, layer.table, plan(batch, layer)), first)


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("rank", [16, 48])
def test_promise_e_replays_see_other_ids_routings_and_entries(planned: bool, rank: int) -> None:
    """One captured layer step: plan, gate_up with SiLU, down; adapters are replaced and dropped between replays."""
    from fanfold.kernels.lora.launch import fold_down, fold_gate_up
    from fanfold.kernels.lora.plan import empty_work, order_rows

    tokens, slots = 24, 4
    gate_up, down = layer_of(slots, 2, (rank, 3)), layer_of(slots, 1, (rank, 5))
    x, y1 = values(tokens, K), values(tokens * TOP_K, 2 * N, seed=1)
    y2 = values(tokens * TOP_K, N, seed=2)
    ids = torch.zeros(tokens, TOP_K, dtype=torch.int32, device="cuda")
    adapters = torch.zeros(tokens, dtype=torch.int32, device="cuda")

    def step(out: Tensor) -> Tensor:
        route, _ = plan_sort(ids, E, 16)
        batch = Batch(ids, adapters, route)
        work = empty_work(route, slots, 16)
        h = torch.zeros_like(y1[:, :N])
        source = order_rows(route, adapters, slots, 16, work=work) if planned else single(batch, True)
        fold_gate_up(y1, x, gate_up.table, source, Activation("silu"), h, chained=True)
        wide = torch.cat([h, h], 1)[:, :K].contiguous()
        return fold_down(out.copy_(y2), wide, down.table, source, chained=True)

    static = torch.empty_like(y2)
    step(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static)
    seen: list[Tensor] = []
    for number in range(40):
        batch = random_batch(tokens, TOP_K, E, slots, "cuda", seed=number)
        ids.copy_(batch.ids)
        adapters.copy_(batch.adapters if number % 5 else torch.full_like(adapters, -1))
        if number % 4 == 3:
            g = torch.Generator().manual_seed(number)
            pairs = {} if number % 8 == 7 else {e: random_pair(N, K, 1 + number % rank, g, BF16) for e in range(E)}
            write(gate_up, number // 4 % 2, number % slots, pairs)
            write(down, 0, (number + 1) % slots, pairs)
        poison(static)
        graph.replay()
        eager = step(torch.empty_like(y2))
        used = plan_sort(ids, E, 16)[0].expert_offsets[-1]
        assert same_bits(static[:used], eager[:used]), number
        seen.append(static.clone())
    assert not torch.equal(seen[1], seen[2])


def test_sums_of_integers_are_exact() -> None:
    """0, 1 and -1 in x, A and B, so that xa, delta and y are integers bf16 holds; scales are powers of two."""
    g = torch.Generator().manual_seed(0)

    def sparse(*shape: int) -> Tensor:
        return (torch.randint(-1, 2, shape, generator=g) * (torch.rand(shape, generator=g) < 0.1)).to(BF16)

    pairs = {(s, e): LoraPair(sparse(16, 2048), sparse(768, 16), 2.0) for s in range(2) for e in range(E)}
    layer = make_layer([pairs, dict(pairs)], 2, E, 768, 2048, 16, BF16, "cuda")
    batch = random_batch(100, TOP_K, E, 2, "cuda")
    x, y = sparse(100, 2048).cuda(), sparse(400, 1536).cuda()
    from fanfold.kernels.lora.launch import fold_gate_up

    wanted = expected(layer, batch, y, x, True, True)
    assert wanted.float().abs().max() < 256
    assert not torch.equal(wanted, y)
    for source in (plan(batch, layer, 16), single(batch, True)):
        assert torch.equal(fold_gate_up(y.clone(), x, layer.table, source), wanted)


def test_windows_of_many_rows() -> None:
    from fanfold.kernels.lora.launch import expand, fold_gate_up, shrink
    from fanfold.kernels.lora.sizes import padded_rank, windows

    layer, batch = layer_of(4, 2, (4, 100)), random_batch(300, TOP_K, E, 4, "cuda")
    x, y = values(300, K), values(1200, 2 * N, seed=1)
    work = plan(batch, layer, 16)
    whole = fold_gate_up(y.clone(), x, layer.table, work)
    check_close(whole, expected(layer, batch, y, x, True, True))
    for cap in (1, 37, 500):
        found, xa = y.clone(), torch.empty(2, cap, padded_rank(100), dtype=BF16, device="cuda")
        for start, end in list(windows(1200, cap)) if cap > 1 else [(p, p + 1) for p in range(0, 1200)]:
            poison(xa)
            shrink("shrink", x, layer.table, work, xa, gather_x=True, row_offset=start, row_end=end)
            expand("expand", found, layer.table, work, xa, row_offset=start, row_end=end)
        assert same_bits(found, whole)


def test_d4_more_than_2_to_31_elements() -> None:
    tokens, n, k = 2**19 + 40, 4096, 64
    g = torch.Generator().manual_seed(0)
    layer = make_layer([{(0, 0): random_pair(n, k, 8, g, BF16)}], 1, 1, n, k, 8, BF16, "cuda")
    ids = torch.zeros(tokens, 1, dtype=torch.int32, device="cuda")
    adapters = torch.full((tokens,), -1, dtype=torch.int32, device="cuda")
    adapters[-20:] = 0
    batch = Batch(ids, adapters, plan_sort(ids, 1, 16)[0])
    h, y = values(tokens, k), torch.zeros(tokens, n, dtype=BF16, device="cuda")
    assert y.numel() > 2**31
    from fanfold.kernels.lora.launch import fold_down

    last = Batch(ids[-20:], adapters[-20:], plan_sort(ids[-20:], 1, 16)[0])
    wanted = expected(layer, last, y[-20:], h[-20:], False, True)
    for source in (plan(batch, layer, 16), single(batch, True)):
        found = fold_down(y.zero_(), h, layer.table, source)
        check_close(found[-20:], wanted)
        assert int(found[:-20].count_nonzero()) == 0
