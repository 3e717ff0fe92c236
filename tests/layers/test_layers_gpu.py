"""Experts on a GPU: every implementation against the reference, in graphs, compiled, at any batch size."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fanfold import Experts
from fanfold.errors import ArgumentError, UnavailableError, UnsupportedError
from fanfold.layers.reference import layer
from fanfold.spec import Activation, ExpertWeights, ProjectionWeights
from graphs import check_replays, dirty_memory, same_bits
from samples import SILU, numbers, random_experts, random_routing, relative_error

pytestmark = pytest.mark.gpu
E, H, INNER, K = 6, 256, 128, 3
ALL = [
    "bf16",
    "gptq2-g64",
    "gptq3-g32-asym-v1",
    "gptq4-g128",
    "gptq4-g32-asym-v1",
    "gptq4-g64-asym-v2",
    "gptq4-g128-actorder",
    "gptq4-g32-asym-v1-actorder",
    "gptq8-channel",
    "awq4-g64-asym",
    "packed4-g128",
    "packed8-g32-asym",
    "nvfp4",
    "nvfp4-divisor",
    "mxfp4",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block128x128",
]


def module(name: str, activation: Activation = SILU, biased: bool = False, **options: Any) -> Experts:
    weights = random_experts(name, E, H, INNER, gated=activation.gated)
    if biased:
        up, down = weights.gate_up, weights.down
        weights = ExpertWeights(
            ProjectionWeights(up.format, INNER, H, up.tensors, numbers(E, up.halves, INNER, seed=1).bfloat16()),
            ProjectionWeights(down.format, H, INNER, down.tensors, numbers(E, 1, H, seed=2).bfloat16()),
        )
    return Experts(weights, activation, dtype=torch.bfloat16, **options)


def batch(tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[Tensor]:
    """x, ids (one of no expert, where there are tokens) and scores, on the GPU."""
    ids, scores = random_routing(tokens, K, E, seed)
    if tokens > 1:
        ids[0, 1] = -1
    return [part.cuda() for part in (numbers(tokens, H, seed=seed, dtype=dtype), ids, scores)]


def expected(experts: Experts, given: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The layer in fp32 on the CPU, of a module that still lies there, and the error of its steps in x's dtype."""
    x, ids, scores = (part.cpu() for part in given)
    rest = ids, scores, experts.weights, experts.activation, None, None, experts.activation_format
    exact = layer(x.float(), *rest)
    return exact, relative_error(layer(x, *rest).float(), exact)


def check(found: Tensor, wanted: tuple[Tensor, float]) -> None:
    """Directions and norms, within twice the error of rounded steps (the kernels round weights too)."""
    exact, plain = wanted
    assert not found.isnan().any()
    assert relative_error(found.cpu().float(), exact) < 2 * plain
    assert abs(float(found.double().norm().cpu() / exact.double().norm()) - 1) < plain


@pytest.mark.parametrize("implementation", ["auto", "grouped"])
@pytest.mark.parametrize("name", ALL)
def test_every_format(name: str, implementation: str) -> None:
    experts = module(name)
    batches = [batch(tokens, seed=tokens) for tokens in (1, 2, 40, 500)]
    wanted = [expected(experts, given) for given in batches]
    experts.requested = implementation
    experts.cuda()
    if implementation == "grouped":
        assert experts.implementation == "grouped"
    for given, exact in zip(batches, wanted, strict=True):
        dirty_memory("cuda")
        check(experts(*given), exact)


@pytest.mark.parametrize("implementation", ["auto", "grouped"])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("name", ["mxfp4", "gptq4-g128-actorder", "bf16"])
def test_biases_and_activations(name: str, kind: str, implementation: str) -> None:
    experts = module(name, Activation(cast("Any", kind)), biased=True)
    for tokens in (1, 70):
        given = batch(tokens)
        exact = expected(module(name, experts.activation, biased=True), given)
        on_gpu = copy.deepcopy(experts)
        on_gpu.requested = implementation
        check(on_gpu.cuda()(*given), exact)


def test_what_auto_chooses() -> None:
    if torch.cuda.get_device_capability() == (9, 0):
        for name in ("gptq4-g128", "gptq4-g128-actorder", "awq4-g64-asym", "nvfp4", "mxfp4"):
            assert module(name).cuda().implementation == "grouped_int4_sm90", name
    assert module("bf16").cuda().implementation == "grouped"
    assert module("gptq4-g128", implementation="reference").cuda().implementation == "reference"


def test_float16() -> None:
    for name in ("gptq4-g128", "fp16", "nvfp4"):
        experts = Experts(random_experts(name, E, H, INNER), SILU, dtype=torch.float16)
        given = batch(33, torch.float16)
        wanted = expected(experts, given)
        check(experts.cuda()(*given), wanted)


@pytest.mark.parametrize("name", ["gptq4-g128", "gptq4-g128-actorder", "nvfp4", "bf16", "fp8-block128x128"])
@pytest.mark.parametrize("tokens", [1, 30, 700])
def test_replays_with_other_routings(name: str, tokens: int) -> None:
    experts = module(name).cuda()
    check_replays(lambda *given: [experts(*given)], [batch(tokens, seed=seed) for seed in range(4)])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", ["gptq4-g128", "bf16"])
def test_compiled_in_one_graph(name: str) -> None:
    experts = module(name).cuda()
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True)
    with torch.no_grad():
        for tokens in (1, 4, 70):
            given = batch(tokens)
            assert same_bits(compiled(*given), experts(*given))


@pytest.mark.parametrize("name", ["gptq4-g128", "gptq4-g64-asym-v2", "nvfp4", "bf16", "fp8-channel"])
def test_batch_invariant(name: str) -> None:
    """A row's bits with any other rows beside it, and at any place."""
    experts = module(name, batch_invariant=True).cuda()
    x, ids, scores = batch(900)
    whole = experts(x, ids, scores)
    for size in (1, 2, 17, 64, 65, 300, 899):
        rows = torch.randperm(900, generator=torch.Generator().manual_seed(size))[:size].cuda()
        assert same_bits(experts(x[rows], ids[rows], scores[rows]), whole[rows]), size


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block128x128"])
def test_activations_in_8_bits(name: str) -> None:
    experts = module(name, activation_format="fp8")
    batches = [batch(tokens, seed=tokens) for tokens in (1, 40, 500)]
    wanted = [expected(experts, given) for given in batches]
    experts.cuda()
    for given, exact in zip(batches, wanted, strict=True):
        dirty_memory("cuda")
        check(experts(*given), exact)


def test_no_tokens() -> None:
    for name in ("gptq4-g128", "bf16"):
        assert module(name).cuda()(*batch(0)).shape == (0, H)


def test_repacked_weights_stay() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("another implementation keeps them as they are")
    experts = module("gptq4-g128")
    resident = experts.nbytes
    experts.cuda()
    assert experts.nbytes <= resident  # one copy: zero points of symmetric files are not kept
    with pytest.raises(UnavailableError, match="repacked for grouped_int4_sm90"):
        _ = experts.weights
    with pytest.raises(ArgumentError, match="a move to cpu of weights repacked"):
        experts.cpu()
    given = batch(9)
    assert same_bits(copy.deepcopy(experts)(*given), experts.half()(*given))


def test_values_that_an_implementation_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    """bf16 scales that fp16 does not hold: the portable product runs them, and a log line says why."""
    weights = random_experts("packed4-g128", E, H, INNER)
    weights.down.tensors["scale"].fill_(2.0**-30)
    with caplog.at_level("INFO", "fanfold"):
        experts = Experts(weights, SILU, dtype=torch.bfloat16).cuda()
    assert experts.implementation == "grouped"
    if torch.cuda.get_device_capability() == (9, 0):
        assert "not grouped_int4_sm90" in caplog.text
        with pytest.raises(UnsupportedError):
            Experts(experts.weights, SILU, dtype=torch.bfloat16, implementation="grouped_int4_sm90")


def test_a29_results_of_a_graph_stay_where_they_are() -> None:
    """Memory that others take between replays is not the result's, nor the scratch's."""
    experts = module("gptq4-g128").cuda()
    given = batch(40)
    expected = experts(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(*given)
    for size in (2**10, 2**16, 2**22):
        garbage = torch.full((size,), torch.nan, device="cuda")
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(out, expected)
        assert garbage.isnan().all()


def test_pairs_without_tables_are_refused() -> None:
    """Kernels read tables alone: pairs kept elsewhere would be left out without a word."""
    experts = module("bf16").cuda()
    with pytest.raises(ArgumentError, match="no tables for adapters; expected room made by `reserve`"):
        experts.put(0, {})
