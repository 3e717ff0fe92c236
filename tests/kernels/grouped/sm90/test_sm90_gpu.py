"""The Hopper product on a GPU: exact on integers, against fp32 on random weights, poisoned outputs, graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from sm90_compiling import other_kernels
from sm90_jobs import integers, projection, to_device
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.grouped.sm90.config import Sm90Config, check_config
from fanfold.kernels.grouped.sm90.prepare import FragmentWeights, prepare
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.spec import ProjectionWeights
from graphs import check_replays, dirty_memory
from samples import relative_error

pytestmark = pytest.mark.gpu
NAMES = ["gptq4-g128", "gptq4-g64-asym-v1", "gptq4-g32-asym-v2", "awq4-g64-asym", "packed4-g128"]
# Sizes that every tuned config divides: 512 rows a program, down's K in 3 parts of 128 and in 4 of 512.
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 1024, 6144


@dataclass(frozen=True, eq=False)
class Layer:
    """Packed projections, and prepared ones."""

    packed: tuple[ProjectionWeights, ProjectionWeights]
    gate_up: FragmentWeights
    down: FragmentWeights


def layer_of(packed: Sequence[ProjectionWeights]) -> Layer:
    gate_up, down = (to_device(weights, "cuda") for weights in packed)
    return Layer((gate_up, down), prepare(gate_up), prepare(down))


def configs() -> list[tuple[Sm90Config, Sm90Config]]:
    """Pairs of the tuned table, each once."""
    return list(dict.fromkeys((row.gate_up, row.down) for row in read_table()))


def run(
    layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Sm90Config, down: Sm90Config, chained: bool
) -> list[Tensor]:
    """h, the result of down added up and rounded at rows, and the layer's output."""
    from fanfold.kernels.combine.combine import combine
    from fanfold.kernels.grouped.sm90.items import single_items, tiled_items
    from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
    from fanfold.routing.plan import plan_sort

    experts = layer.down.num_experts
    if x.shape[0] == 1 and gate_up.block_t == 8:
        work, positions = single_items(ids, experts), torch.arange(ids.numel(), device=x.device)
    else:
        route, tiles = plan_sort(ids, experts, gate_up.block_t)
        work, positions = tiled_items(route, tiles), route.positions.long()
    h = grouped_gate_up(x, layer.gate_up, work, ids.shape[1], gate_up, chained)
    y2 = grouped_down(h, layer.down, work, down, chained)
    out = combine(y2, ids, weights, experts, dtype=x.dtype)
    if y2.dim() == 3:
        total = y2[0]
        for part in y2[1:]:
            total = total + part
        y2 = total.to(x.dtype)
    return [h[positions], y2, out]


def reference(layer: Layer, x: Tensor, ids: Tensor, weights: Tensor, rounded: bool) -> list[Tensor]:
    """The same in fp32, rounded to x's dtype between the steps; rounded: weights too. Rows of no expert hold 0."""
    gate_up, down = layer.packed
    flat, top_k = ids.flatten(), ids.shape[1]
    h = torch.zeros(len(flat), gate_up.n, device=x.device)
    y2 = torch.zeros(len(flat), down.n, device=x.device)

    def act(t: Tensor) -> Tensor:
        return t.to(x.dtype).float()

    def matrix(packed: ProjectionWeights, e: int, half: int) -> Tensor:
        w = dequantize_expert(packed, e, half)
        return act(w) if rounded else w

    for e in range(gate_up.num_experts):
        rows = (flat == e).nonzero()[:, 0]
        if len(rows):
            gate, up = (act(x[rows // top_k].float() @ matrix(gate_up, e, half).T) for half in (0, 1))
            h[rows] = act(torch.nn.functional.silu(gate) * up)
            y2[rows] = act(h[rows] @ matrix(down, e, 0).T)
    out = torch.zeros(x.shape[0], down.n, device=x.device)
    for slot in range(top_k):
        out += weights[:, slot, None].float() * y2.view(x.shape[0], top_k, -1)[:, slot]
    return [h, y2, out]


def batch(
    tokens: int, dtype: torch.dtype, experts: int, top_k: int = TOP_K, k: int = HIDDEN, seed: int = 0
) -> list[Tensor]:
    """x, ids (some of no expert, and expert 2 without rows) and weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, k, generator=generator, device="cuda").to(dtype)
    scores = torch.rand(tokens, experts + 1, generator=generator, device="cuda")
    scores[:, 2] = -1.0
    ids = scores.topk(top_k).indices.int()
    weights = torch.rand(tokens, top_k, generator=generator, device="cuda")
    return [x, ids, weights]


def check(layer: Layer, tokens: int, gate_up: Sm90Config, down: Sm90Config, dtype: torch.dtype) -> None:
    """The layer against fp32: nearer than a plain evaluation with rounded weights; nothing poisoned is left."""
    x, ids, weights = batch(tokens, dtype, layer.down.num_experts, k=layer.gate_up.k)
    exact, rounded = (reference(layer, x, ids, weights, r) for r in (False, True))
    plain = relative_error(rounded[2], exact[2])
    wanted = exact if gate_up.scale_on_sum or layer.down.fp4_group else rounded
    for chained in (False, True):
        for _ in range(3):
            dirty_memory("cuda")
            _, y2, out = run(layer, x, ids, weights, gate_up, down, chained)
            here = ids.flatten() < layer.down.num_experts
            assert not y2[here].isnan().any()
            assert relative_error(out, wanted[2]) < plain
            assert abs(float(out.double().norm() / exact[2].double().norm()) - 1) < plain


@pytest.fixture(scope="module")
def random_layer() -> Layer:
    return layer_of(
        [integers("gptq4-g128", EXPERTS, p, n, k) for p, n, k in ((2, INTERMEDIATE, HIDDEN), (1, HIDDEN, INTERMEDIATE))]
    )


@pytest.fixture(scope="module")
def exact_layer() -> Layer:
    """Scales of 1 and 1/2: sums of small integers are exact in fp32, whatever their order."""
    return layer_of(
        [
            integers("gptq4-g128", EXPERTS, p, n, k, exact=True)
            for p, n, k in ((2, INTERMEDIATE, HIDDEN), (1, HIDDEN, INTERMEDIATE))
        ]
    )


@pytest.mark.parametrize("pair", configs(), ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_integers_are_exact(pair: tuple[Sm90Config, Sm90Config], exact_layer: Layer) -> None:
    """Down bit for bit; h within one rounding, since exp differs in its last bits."""
    from fanfold.kernels.grouped.sm90.items import tiled_items
    from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
    from fanfold.routing.plan import plan_sort

    gate_up, down = pair
    generator = torch.Generator("cuda").manual_seed(1)
    _, ids, _ = batch(290, torch.bfloat16, EXPERTS)
    x = torch.randint(-3, 4, (290, HIDDEN), generator=generator, device="cuda").bfloat16() / 32
    h = torch.randint(-3, 4, (580, INTERMEDIATE), generator=generator, device="cuda").bfloat16()
    route, tiles = plan_sort(ids, EXPERTS, gate_up.block_t)
    work = tiled_items(route, tiles)
    for chained in (False, True):
        for _ in range(3):
            torch.cuda.synchronize()
            dirty_memory("cuda")
            found_h = grouped_gate_up(x, exact_layer.gate_up, work, TOP_K, gate_up, chained)
            y2 = grouped_down(h, exact_layer.down, work, down, chained)
            y2 = (y2.sum(0) if y2.dim() == 3 else y2).to(h.dtype)
            for e in range(EXPERTS):
                rows = (ids.flatten() == e).nonzero()[:, 0]
                positions = route.positions[rows].long()
                w = dequantize_expert(exact_layer.packed[1], e, 0)
                assert torch.equal(y2[rows], (h[positions].double() @ w.double().T).to(h.dtype))
                gate, up = (
                    (x[rows // TOP_K].double() @ dequantize_expert(exact_layer.packed[0], e, half).double().T)
                    .to(x.dtype)
                    .double()
                    for half in (0, 1)
                )
                expected = torch.nn.functional.silu(gate) * up
                error = (found_h[positions].double() - expected).abs() / expected.abs().clamp_min(1e-2)
                assert (error <= 2.0**-7).all()


@pytest.mark.parametrize("tokens", [1, 3, 64, 1500])
@pytest.mark.parametrize("pair", configs(), ids=lambda pair: f"{pair[0].name} {pair[1].name}")
def test_every_tuned_config(pair: tuple[Sm90Config, Sm90Config], tokens: int, random_layer: Layer) -> None:
    check(random_layer, tokens, *pair, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_integer_format(name: str, dtype: torch.dtype) -> None:
    layer = layer_of([integers(name, 5, p, n, k) for p, n, k in ((2, 512, 1024), (1, 1024, 512))])
    for config in {kernel.config for kernel in other_kernels()}:
        if config.scale_on_sum and layer.down.format.group_size < 64:
            continue
        check_config("test", config, layer.down)
        for tokens in (1, 70, 700):
            check(layer, tokens, config, config, dtype)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-divisor", "mxfp4"])
def test_c1_fp4(name: str) -> None:
    """Every expert and half has another global scale."""
    layer = layer_of([projection(name, 5, p, n, k) for p, n, k in ((2, 512, 1024), (1, 1024, 512))])
    for config in (Sm90Config(16, 16, 1, 2, 128, 3, 1, False), Sm90Config(128, 32, 1, 2, 128, 3, 8, False)):
        for tokens in (9, 70, 700):
            x, ids, weights = batch(tokens, torch.bfloat16, 5, k=1024)
            exact = reference(layer, x, ids, weights, rounded=False)
            _, _, out = run(layer, x, ids, weights, config, config, chained=True)
            assert relative_error(out, exact[2]) < 4e-3
            assert abs(float(out.double().norm() / exact[2].double().norm()) - 1) < 2e-3


@pytest.mark.parametrize("tokens", [1, 64, 900])
@pytest.mark.parametrize("chained", [False, True])
def test_replays(tokens: int, chained: bool, random_layer: Layer) -> None:
    row = next(row for row in read_table() if row.tokens == (1 if tokens == 1 else 64 if tokens == 64 else 1024))
    batches = [batch(tokens, torch.bfloat16, EXPERTS, seed=seed) for seed in range(3)]
    check_replays(
        lambda x, ids, weights: run(random_layer, x, ids, weights, row.gate_up, row.down, chained)[2:], batches
    )


def test_rows_of_no_expert_are_not_written(random_layer: Layer) -> None:
    row = next(row for row in read_table() if row.tokens == 64)
    x, ids, weights = batch(40, torch.bfloat16, EXPERTS)
    ids[::2] = -1
    ids[1::2] = EXPERTS
    out = run(random_layer, x, ids, weights, row.gate_up, row.down, chained=True)[2]
    assert torch.equal(out, torch.zeros_like(out))


def test_the_same_bits_from_run_to_run(random_layer: Layer) -> None:
    for row in read_table()[:6]:
        x, ids, weights = batch(200, torch.bfloat16, EXPERTS)
        first = run(random_layer, x, ids, weights, row.gate_up, row.down, chained=True)[2]
        for _ in range(5):
            assert torch.equal(run(random_layer, x, ids, weights, row.gate_up, row.down, chained=True)[2], first)
