"""torch.ops.fanfold: contracts of every op, composition equals the layer, compiled equals eager."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold import load_experts, ops
from fanfold.errors import ArgumentError, InferenceOnlyError
from fanfold.layers.reference import layer
from fanfold.spec import Activation, ExpertWeights
from fanfold.spec.weights import ProjectionWeights
from graphs import check_replays
from samples import SILU, numbers, on, random_experts, random_routing, relative_error, sample

E, H, INNER, T, K = 6, 64, 32, 9, 2
NAMES = [
    name for name in ops.OPS if not name.startswith(("lora_", "nvfp4_"))
]  # those: test_ops_lora.py, test_ops_nvfp4.py
FORMATS = ["bf16", "gptq4-g32-asym-v1-actorder", "awq4-g32", "packed8-channel", "nvfp4", "mxfp4", "fp8-block32x32"]
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
# Inductor imports parts of torch that torch itself has deprecated.
INDUCTOR = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def composed(weights: ExpertWeights, activation: Activation = SILU) -> Call:
    """The layer as a host composes it of ops: x, ids, scores -> out."""
    fanfold = torch.ops.fanfold
    gate_up, down = ops.packed(weights.gate_up), ops.packed(weights.down)
    tiles = {
        dtype: ops.plan_tile(weights.gate_up, dtype, T * K, gate_up[2][0].device)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    }

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        tile = tiles[x.dtype]
        offsets, rows, positions, work = fanfold.plan_sort(ids, E, tile)
        y1 = fanfold.grouped_gate_up(x, offsets, rows, work, tile, ids.shape[1], *gate_up)
        h = fanfold.activation(y1, activation.kind, activation.alpha, activation.limit)
        y2 = fanfold.grouped_down(h, offsets, rows, work, tile, *down)
        return fanfold.combine(y2[positions.long()], ids, scores, E)

    return run


def gathered(weights: ExpertWeights, activation: Activation = SILU) -> Call:
    """The layer without a plan."""
    fanfold = torch.ops.fanfold
    gate_up, down = ops.packed(weights.gate_up), ops.packed(weights.down)

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        y1 = fanfold.gather_gate_up(x, ids, *gate_up)
        h = fanfold.activation(y1, activation.kind, activation.alpha, activation.limit)
        return fanfold.combine(fanfold.gather_down(h, ids, *down), ids, scores, E)

    return run


def with_biases() -> ExpertWeights:
    weights = random_experts("mxfp4", E, H, INNER)
    up, down = weights.gate_up, weights.down
    return ExpertWeights(
        ProjectionWeights(up.format, INNER, H, up.tensors, numbers(E, 2, INNER, seed=1).bfloat16()),
        ProjectionWeights(down.format, H, INNER, down.tensors, numbers(E, 1, H, seed=2).bfloat16()),
    )


def arguments(name: str, place: str = "cpu") -> list[tuple[Any, ...]]:
    """Several calls of each op: formats, dtypes, biases, no rows."""
    calls: list[tuple[Any, ...]] = []
    for tokens, dtype, weights, activation in (
        (T, torch.float32, random_experts("gptq4-g32", E, H, INNER), SILU),
        (T, torch.bfloat16, with_biases(), Activation("clamped_swiglu")),
        (0, torch.float16, random_experts("mxfp4", E, H, INNER, gated=False), Activation("relu2")),
    ):
        weights = on(weights, place)
        gate_up, down = ops.packed(weights.gate_up), ops.packed(weights.down)
        x = numbers(tokens, H, dtype=dtype).to(place)
        ids, scores = (part.to(place) for part in random_routing(tokens, K, E))
        fanfold = torch.ops.fanfold
        tile = ops.plan_tile(weights.gate_up, dtype, tokens * K, x.device)
        offsets, rows, positions, work = fanfold.plan_sort(ids, E, tile)
        y1 = fanfold.grouped_gate_up(x, offsets, rows, work, tile, K, *gate_up)
        h = fanfold.activation(y1, activation.kind, activation.alpha, activation.limit)
        y2 = fanfold.grouped_down(h, offsets, rows, work, tile, *down)
        logits = numbers(tokens, E, seed=3, dtype=dtype).to(place)
        bias = numbers(E, seed=4).to(place) if tokens else None
        calls.append(
            {
                "route_topk": (logits, bias, K, "sigmoid", True, 2, 1, "top2_sum", 2.5),
                "plan_sort": (ids, E, tile),
                "plan_blocks": (ids, E, 16, dtype == torch.bfloat16),
                "grouped_gate_up": (x, offsets, rows, work, tile, K, *gate_up),
                "gather_gate_up": (x, ids, *gate_up),
                "gather_down": (h, ids, *down),
                "activation": (y1, activation.kind, activation.alpha, activation.limit),
                "grouped_down": (h, offsets, rows, work, tile, *down),
                "combine": (y2[positions.long()], ids, scores, E),
            }[name]
        )
    return calls


@INDUCTOR
@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("name", NAMES)
@PLACES
def test_opcheck(place: str, name: str, call: int) -> None:
    op = getattr(torch.ops.fanfold, name).default
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments(name, place)[call], test_utils=checks)


@pytest.mark.parametrize("name", NAMES)
@PLACES
def test_fakes_have_the_shapes_and_dtypes_of_the_results(place: str, name: str) -> None:
    for call in arguments(name, place):
        meta = [_to_meta(value) for value in call]
        found, expected = ops.OPS[name].fake(*meta), getattr(torch.ops.fanfold, name)(*call)
        for a, b in zip(_tuple(found), _tuple(expected), strict=True):
            assert (a.shape, a.dtype, a.is_contiguous()) == (b.shape, b.dtype, b.is_contiguous())


def _to_meta(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_meta(part) for part in value]
    return value.to("meta") if isinstance(value, Tensor) else value


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_ops_together_are_the_layer(name: str, dtype: torch.dtype) -> None:
    weights = random_experts(name, E, H, INNER)
    x = numbers(T, H, dtype=dtype)
    ids, scores = random_routing(T, K, E)
    ids[0, 0], ids[3, 1] = -1, E
    for form in (composed, gathered):
        assert torch.equal(form(weights)(x, ids, scores), layer(x, ids, scores, weights, SILU))


def test_the_ops_together_with_biases() -> None:
    weights, activation = with_biases(), Activation("clamped_swiglu")
    x = numbers(T, H)
    ids, scores = random_routing(T, K, E)
    assert torch.equal(composed(weights, activation)(x, ids, scores), layer(x, ids, scores, weights, activation))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("name", [*FORMATS, "with biases"])
def test_the_ops_together_are_the_layer_on_a_gpu(name: str, dtype: torch.dtype, error: float) -> None:
    """Within the rounding of weights and results to the activations' dtype; replays with other routings are equal."""
    weights = with_biases() if name == "with biases" else random_experts(name, E, H, INNER)
    activation = Activation("clamped_swiglu") if name == "with biases" else SILU
    run = composed(on(weights, "cuda"), activation)
    short = gathered(on(weights, "cuda"), activation)
    batches: list[tuple[Tensor, ...]] = []
    for seed in range(3):
        ids, scores = random_routing(T, K, E, seed)
        ids[0, 0], ids[3, 1] = -1, E
        batches.append(tuple(part.cuda() for part in (numbers(T, H, seed=seed, dtype=dtype), ids, scores)))
        expected = layer(numbers(T, H, seed=seed, dtype=dtype).float(), ids, scores, weights, activation)
        for form in (run, short):
            assert relative_error(form(*batches[-1]).cpu().float(), expected) < error
    check_replays(lambda *given: [run(*given)], batches)


@INDUCTOR
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@PLACES
def test_compiled_for_any_number_of_tokens(place: str, backend: str) -> None:
    whole = composed(on(random_experts("gptq4-g32", E, H, INNER), place))

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return whole(2 * x, ids, scores) + x

    torch._dynamo.reset()
    counter = _Counter(backend)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for tokens in (5, 9, 33):
        given = [part.to(place) for part in (numbers(tokens, H), *random_routing(tokens, K, E))]
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 0)  # an error where something fixes the number of tokens
        assert torch.equal(compiled(*given), run(*given))
    assert counter.calls == 1


@INDUCTOR
def test_compiled_with_every_size_dynamic() -> None:
    run = composed(random_experts("gptq4-g32", E, H, INNER))
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 1, 33, 0):
        given = numbers(tokens, H), *random_routing(tokens, K, E)
        assert torch.equal(compiled(*given), run(*given))


class _Counter:
    """A backend that counts how often it is asked to compile."""

    def __init__(self, backend: str) -> None:
        self.inner: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.calls += 1
        return self.inner(graph, inputs)


FRESH = """
import torch, fanfold
ids = torch.tensor([[2, 0], [0, -1]])
run = torch.compile(lambda ids: torch.ops.fanfold.plan_sort(ids, 3, 16)[1] + 1, fullgraph=True, backend="aot_eager")
print(run(ids).tolist())
"""


def test_the_first_compile_of_a_process() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.strip() == "[2, 3, 1, 4]", run.stderr


@pytest.mark.parametrize("name", ["route_topk", "grouped_gate_up", "gather_down", "activation", "combine"])
def test_backward_raises(name: str) -> None:
    first, *rest = arguments(name)[0]
    out = _tuple(getattr(torch.ops.fanfold, name)(first.clone().requires_grad_(), *rest))[-1]
    assert out.requires_grad
    with pytest.raises(InferenceOnlyError, match=r"torch\.no_grad"):
        out.sum().backward()


def test_backward_raises_for_router_weights_too() -> None:
    y2, ids, scores, experts = arguments("combine")[0]
    with pytest.raises(InferenceOnlyError):
        torch.ops.fanfold.combine(y2, ids, scores.requires_grad_(), experts).sum().backward()


def test_an_unknown_activation() -> None:
    with pytest.raises(ArgumentError, match="found 'swish'; expected one of silu, gelu_tanh"):
        torch.ops.fanfold.activation(numbers(2, 4), "swish", 1.0, 1.0)


def test_ops_of_a_checkpoint_equal_its_experts() -> None:
    experts = load_experts(sample("gptq-int4"), layer=2, dtype=torch.float32)
    x = numbers(T, experts.shape.hidden)
    ids, scores = random_routing(T, 4, E)
    found = composed(experts.weights)(x, ids, scores)
    assert torch.equal(found, experts(x, ids, scores))
