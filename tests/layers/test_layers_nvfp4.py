"""Layers with activations in NVFP4: what chooses them, adapters, kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from test_layers_grouped import adapters_of, batch, run
from torch import Tensor
from torch.nn.functional import silu

from fanfold import Experts, load_experts
from fanfold.errors import UnsupportedError
from fanfold.layers.reference import layer
from fanfold.spec import Activation, ExpertWeights, ProjectionWeights
from graphs import check_replays, dirty_memory, same_bits
from samples import SILU, numbers, on, random_experts, random_pairs, random_routing, relative_error, sample

E, H, INNER, K, SLOTS = 4, 64, 32, 2, 3
KINDS = ["alike", "unlike", "missing"]


def with_scales(weights: ExpertWeights, kind: str) -> ExpertWeights:
    """Input scales as a checkpoint has them: the same for all experts, one for each, or not for all."""

    def one(projection: ProjectionWeights, largest: float) -> ProjectionWeights:
        experts = torch.arange(projection.num_experts)
        factors = torch.ones(len(experts)) if kind == "alike" else 0.5 + 0.3 * experts
        scales = (largest / 2688 * factors)[:, None].expand(-1, projection.halves).clone()
        if kind == "missing":
            scales[1:3] = 0
        stored = scales.reciprocal() if projection.format.divisor else scales
        return replace(projection, tensors={**projection.tensors, "input_scale": stored})

    return ExpertWeights(one(weights.gate_up, 4.0), one(weights.down, 8.0))


def test_the_checkpoint_chooses_and_the_caller_overrides() -> None:
    stated, weight_only = sample("ct_qwen3moe_nvfp4"), sample("ct_qwen3moe_nvfp4a16")
    x, routing = numbers(5, 128), random_routing(5, 2, 8)
    found = {
        (path.name, asked): load_experts(path, dtype=torch.float32, activation_format=asked)(x, *routing)
        for path in (stated, weight_only)
        for asked in ("auto", "plain", "nvfp4")
    }
    for path, same, other in ((stated, "nvfp4", "plain"), (weight_only, "plain", "nvfp4")):
        assert torch.equal(found[path.name, "auto"], found[path.name, same])
        assert 0.05 < relative_error(found[path.name, "auto"], found[path.name, other]) < 0.5


def test_lora_reads_activations_as_they_are() -> None:
    weights = with_scales(random_experts("nvfp4", E, H, INNER), "unlike")
    pairs = random_pairs(weights, 1)
    x, (ids, scores) = numbers(6, H), random_routing(6, K, E)
    slots = torch.zeros(6).int()

    def gate_alone(scale: float) -> Tensor:
        """With `scale` times the pairs of gate and up, without those of down."""
        some = {
            name: {key: replace(pair, scale=scale * pair.scale) for key, pair in pairs[name].items()}
            for name in ("gate", "up")
        }
        return layer(x, ids, scores, weights, SILU, some, slots, "nvfp4")

    base = layer(x, ids, scores, weights, SILU, None, None, "nvfp4")
    assert torch.equal(gate_alone(0.0), base)
    # down's pairs alone: the change is that of the same h, not rounded
    down = layer(x, ids, scores, weights, SILU, {"down": pairs["down"]}, slots, "nvfp4")
    expected = base.clone().double()
    for token in range(6):
        for slot in range(K):
            e = int(ids[token, slot])
            one = torch.full((1, 1), e)
            h = hidden_of(x[token : token + 1], weights, one)
            pair = pairs["down"][0, e]
            expected[token] += scores[token, slot].double() * pair.scale * (h @ pair.a.T @ pair.b.T)[0].double()
    assert relative_error(down, expected) < 1e-5
    assert relative_error(base, expected) > 0.05


def hidden_of(x: Tensor, weights: ExpertWeights, ids: Tensor) -> Tensor:
    """h of one expert: a layer whose down is the unit matrix would round it, so both products of gate and up."""
    from fanfold.kernels.nvfp4.projection import product

    offsets = (torch.arange(E + 1) > int(ids)).int()
    gate, up = product(x, weights.gate_up, offsets).chunk(2, dim=1)
    return silu(gate) * up


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_the_module_runs_the_reference(tokens: int, kind: str) -> None:
    weights = with_scales(random_experts("nvfp4-divisor", E, H, INNER), kind)
    experts = Experts(weights, SILU, dtype=torch.bfloat16, activation_format="nvfp4")
    x, (ids, scores) = numbers(tokens, H, dtype=torch.bfloat16), random_routing(tokens, K, E)
    found = experts(x, ids, scores)
    assert torch.equal(found, layer(x, ids, scores, weights, SILU, activation_format="nvfp4"))
    assert "activations=nvfp4" in repr(experts)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="activation_format nvfp4 of experts: found gptq4-g32, gptq4-g32"):
        Experts(random_experts("gptq4-g32"), SILU, dtype=torch.bfloat16, activation_format="nvfp4")


def grouped_layer(kind: str, device: str, name: str = "nvfp4", gated: bool = True) -> tuple[Any, ExpertWeights]:
    from fanfold.layers.implementations.grouped import Grouped

    weights = with_scales(random_experts(name, E, H, INNER, gated=gated), kind)
    activation = SILU if gated else Activation("relu2")
    return Grouped.prepared(on(weights, device), activation, False, "nvfp4"), weights


def check(found: Tensor, weights: ExpertWeights, given: list[Tensor], activation: Activation, *adapters: Any) -> None:
    """Against the layer in fp32, within twice the error of one in x's dtype: rounding of h moves codes."""
    x, ids, scores = (part.cpu() for part in given[:3])
    rest = ids, scores, weights, activation, *(adapters or (None, None)), "nvfp4"
    exact, plain = layer(x.float(), *rest), layer(x, *rest)
    assert not found.isnan().any()
    error = relative_error(plain, exact)
    assert relative_error(found.cpu(), exact) < 2 * error
    assert abs(float(found.double().norm().cpu() / exact.double().norm()) - 1) < error
    weight_only = layer(x.float(), *rest[:-1])
    assert relative_error(found.cpu(), exact) < relative_error(weight_only, exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_kernels_give_the_reference(tokens: int, kind: str, device: str) -> None:
    made, weights = grouped_layer(kind, device, "nvfp4-divisor" if tokens == 5 else "nvfp4")
    given = batch(tokens, torch.float16, device)
    dirty_memory(device)
    check(made.run(*given[:3], None), weights, given, SILU)


@pytest.mark.parametrize(
    ("kind", "tokens", "gated", "few_rows"),
    [("unlike", 1, True, 128), ("alike", 3, True, 128), ("missing", 3, False, 4), ("unlike", 5, True, 4)],
)
def test_adapters_on_rounded_activations(
    kind: str, tokens: int, gated: bool, few_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fanfold.layers.implementations.folding.FEW_ROWS", few_rows)
    made, weights = grouped_layer(kind, device, gated=gated)
    pairs = random_pairs(weights, SLOTS, ranks=(1, 4, 12, 16), dtype=torch.float16)
    tables, kept = adapters_of(pairs, device, torch.float16, gated)
    given = batch(tokens, torch.float16, device)
    dirty_memory(device)
    found = run(made, tables, given)
    check(found, weights, given, made.activation, pairs, given[3].cpu())
    changed = ((given[3] >= 0) & (given[3] < SLOTS)).cpu()
    if kind != "missing" and tokens > 1:  # scales made at each call are those of all rows
        without = made.run(*given[:3], None)
        assert same_bits(found[~changed.to(device)], without[~changed.to(device)])
    assert len(kept) == SLOTS


def test_weights_stay_as_on_disk(device: str) -> None:
    made, weights = grouped_layer("unlike", device)
    packed = made.packed
    for found, expected in ((packed.gate_up, weights.gate_up), (packed.down, weights.down)):
        assert found.tensors["global_scale"].cpu().equal(expected.tensors["global_scale"])


GPU = pytest.mark.gpu
BIG = {"experts": 6, "hidden": 256, "intermediate": 128}


def big_module(kind: str, name: str = "nvfp4", **options: Any) -> Experts:
    weights = with_scales(random_experts(name, **cast("Any", BIG)), kind)
    return Experts(weights, SILU, dtype=torch.bfloat16, activation_format="nvfp4", **options)


def big_batch(tokens: int, seed: int = 0) -> list[Tensor]:
    ids, scores = random_routing(tokens, 3, BIG["experts"], seed)
    return [part.cuda() for part in (numbers(tokens, BIG["hidden"], seed=seed, dtype=torch.bfloat16), ids, scores)]


@GPU
@pytest.mark.parametrize("implementation", ["auto", "grouped"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu(kind: str, implementation: str) -> None:
    experts = big_module(kind, "nvfp4-divisor")
    weights = experts.weights
    experts.requested = implementation
    experts.cuda()
    if torch.cuda.get_device_capability() == (9, 0):
        assert experts.implementation == ("grouped_int4_sm90" if implementation == "auto" else "grouped")
    for tokens in (1, 2, 40, 500):
        given = big_batch(tokens, seed=tokens)
        dirty_memory("cuda")
        check(experts(*given), weights, given, SILU)


@GPU
@pytest.mark.parametrize("implementation", ["auto", "grouped"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 30, 700])
def test_replays_with_other_routings(kind: str, implementation: str, tokens: int) -> None:
    experts = big_module(kind)
    experts.requested = implementation
    experts.cuda()
    check_replays(lambda *given: [experts(*given)], [big_batch(tokens, seed=seed) for seed in range(4)])


@GPU
@pytest.mark.parametrize("implementation", ["auto", "grouped"])
@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_adapters_in_replays(implementation: str, tokens: int) -> None:
    experts = big_module("unlike")
    weights = experts.weights
    pairs = random_pairs(weights, SLOTS, dtype=torch.bfloat16)
    experts.requested = implementation
    experts.cuda()
    experts.reserve(SLOTS, 16)
    from fanfold.lora.convert import convert

    for slot in range(SLOTS):
        of_slot = {(p, e): pair for p, of in pairs.items() for (s, e), pair in of.items() if s == slot}
        experts.put(slot, cast("Any", convert(cast("Any", of_slot), experts)))
    batches = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        batches.append(
            [*big_batch(tokens, seed), torch.randint(-1, SLOTS, (tokens,), generator=generator).int().cuda()]
        )
    for given in batches:
        check(experts(*given), weights, given, SILU, pairs, given[3].cpu())
    check_replays(lambda *given: [experts(*given)], batches)


@GPU
@pytest.mark.parametrize("kind", ["alike", "unlike"])
def test_batch_invariant(kind: str) -> None:
    experts = big_module(kind, batch_invariant=True).cuda()
    x, ids, scores = big_batch(900)
    whole = experts(x, ids, scores)
    for size in (1, 2, 17, 64, 300, 899):
        rows = torch.randperm(900, generator=torch.Generator().manual_seed(size))[:size].cuda()
        assert same_bits(experts(x[rows], ids[rows], scores[rows]), whole[rows]), size
