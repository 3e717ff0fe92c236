"""What GPU tests of the Hopper product share: a layer of its parts, the same in fp32, and their comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sm90_jobs import integers, to_device
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.activation.reference import activate
from fanfold.kernels.grouped.sm90.config import Sm90Config
from fanfold.kernels.grouped.sm90.prepare import prepare_layer
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.kernels.grouped.sm90.weights import FragmentWeights
from fanfold.spec import Activation, ExpertWeights, ProjectionWeights
from graphs import dirty_memory
from samples import relative_error

SILU = Activation()
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
    return Layer((gate_up, down), *prepare_layer(ExpertWeights(gate_up, down)))


def configs() -> list[tuple[Sm90Config, Sm90Config]]:
    """Pairs of the tuned table, each once."""
    return list(dict.fromkeys((row.gate_up, row.down) for row in read_table()))


def run(
    layer: Layer,
    batch: Sequence[Tensor],
    gate_up: Sm90Config,
    down: Sm90Config,
    chained: bool = True,
    activation: Activation = SILU,
    single: bool | None = None,
) -> list[Tensor]:
    """h, the result of down added up and rounded at rows, and the layer's output.

    Args:
        layer: weights.
        batch: x, ids and weights.
        gate_up, down, chained: how to launch.
        activation: behind gate_up.
        single: a program a row; None: for one token.
    """
    from fanfold.kernels.combine.combine import combine
    from fanfold.kernels.grouped.sm90.items import single_items
    from fanfold.kernels.grouped.sm90.launch import grouped_down, grouped_gate_up
    from fanfold.routing.plan import plan_items

    x, ids, weights = batch
    experts = layer.down.num_experts
    if x.shape[0] == 1 if single is None else single:
        work, positions = single_items(ids, experts), torch.arange(ids.numel(), device=x.device)
    else:
        route, work = plan_items(ids, experts, gate_up.block_t)
        positions = route.positions.long()
    h = grouped_gate_up(x, layer.gate_up, work, ids.shape[1], gate_up, activation, chained)
    y2 = grouped_down(h, layer.down, work, down, chained)
    out = combine(y2, ids, weights, experts, dtype=x.dtype)
    if y2.dim() == 3:
        total = y2[0]
        for part in y2[1:]:
            total = total + part
        y2 = total.to(x.dtype)
    return [h[positions], y2, out]


def reference(layer: Layer, batch: Sequence[Tensor], rounded: bool, activation: Activation = SILU) -> Tensor:
    """The layer in fp32, rounded to x's dtype between the steps; rounded: weights too."""
    x, ids, weights = batch
    gate_up, down = layer.packed
    flat, top_k = ids.flatten(), ids.shape[1]
    y2 = torch.zeros(len(flat), down.n, device=x.device)

    def act(t: Tensor) -> Tensor:
        return t.to(x.dtype).float()

    def product(packed: ProjectionWeights, e: int, half: int, x: Tensor) -> Tensor:
        w = dequantize_expert(packed, e, half)
        y = x @ (act(w) if rounded else w).T
        return act(y if packed.bias is None else y + packed.bias[e, half].float())

    for e in range(gate_up.num_experts):
        rows = (flat == e).nonzero()[:, 0]
        if len(rows):
            xs = x[rows // top_k].float()
            y1 = torch.cat([product(gate_up, e, half, xs) for half in range(gate_up.halves)], 1)
            y2[rows] = product(down, e, 0, act(activate(y1, activation)))
    out = torch.zeros(x.shape[0], down.n, device=x.device)
    for slot in range(top_k):
        out += weights[:, slot, None].float() * y2.view(x.shape[0], top_k, -1)[:, slot]
    return out


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


def check(
    layer: Layer,
    tokens: int,
    gate_up: Sm90Config,
    down: Sm90Config,
    dtype: torch.dtype = torch.bfloat16,
    activation: Activation = SILU,
) -> None:
    """The layer against fp32: nearer than a plain evaluation with rounded weights; nothing poisoned is left."""
    given = batch(tokens, dtype, layer.down.num_experts, k=layer.gate_up.k)
    exact, rounded = (reference(layer, given, r, activation) for r in (False, True))
    # The rounding of the output alone remains where all weights are exact in the dtype.
    limit = max(relative_error(rounded, exact), torch.finfo(dtype).eps / 2)
    wanted = exact if gate_up.scale_on_sum or layer.down.fp4_group else rounded
    here = given[1].flatten() < layer.down.num_experts
    for chained in (False, True):
        for _ in range(3):
            dirty_memory("cuda")
            _, y2, out = run(layer, given, gate_up, down, chained, activation)
            assert not y2[here].isnan().any()
            assert relative_error(out, wanted) < limit
            assert abs(float(out.double().norm() / exact.double().norm()) - 1) < limit


def integer_layer(exact: bool) -> Layer:
    """Of int4, group size 128, in the sizes above."""
    sizes = ((2, INTERMEDIATE, HIDDEN), (1, HIDDEN, INTERMEDIATE))
    return layer_of([integers("gptq4-g128", EXPERTS, p, n, k, exact=exact) for p, n, k in sizes])
