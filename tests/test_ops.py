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
from samples import SILU, numbers, random_experts, random_routing, sample

E, H, INNER, T, K = 6, 64, 32, 9, 2
FORMATS = ["bf16", "gptq4-g32-asym-v1-actorder", "awq4-g32", "packed8-channel", "nvfp4", "mxfp4", "fp8-block32x32"]
# Inductor imports parts of torch that torch itself has deprecated.
INDUCTOR = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

Packed = tuple[str, list[str], list[Tensor], Tensor | None, int, int]


def packed(projection: ProjectionWeights) -> Packed:
    tensors = projection.tensors
    return (
        projection.format.name,
        list(tensors),
        list(tensors.values()),
        projection.bias,
        projection.n,
        projection.k,
    )


def composed(x: Tensor, ids: Tensor, scores: Tensor, gate_up: Packed, down: Packed, activation: Activation) -> Tensor:
    """The layer as a host composes it of ops."""
    fanfold = torch.ops.fanfold
    offsets, rows, positions = fanfold.plan_sort(ids, E)
    y1 = fanfold.grouped_gate_up(x, offsets, rows, ids.shape[1], *gate_up)
    h = fanfold.activation(y1, activation.kind, activation.alpha, activation.limit)
    y2 = fanfold.grouped_down(h, offsets, *down)
    return fanfold.combine(y2[positions.long()], ids, scores, E)


def with_biases() -> ExpertWeights:
    weights = random_experts("mxfp4", E, H, INNER)
    up, down = weights.gate_up, weights.down
    return ExpertWeights(
        ProjectionWeights(up.format, INNER, H, up.tensors, numbers(E, 2, INNER, seed=1).bfloat16()),
        ProjectionWeights(down.format, H, INNER, down.tensors, numbers(E, 1, H, seed=2).bfloat16()),
    )


def arguments(name: str) -> list[tuple[Any, ...]]:
    """Several calls of each op: formats, dtypes, biases, no rows."""
    calls: list[tuple[Any, ...]] = []
    for tokens, dtype, weights, activation in (
        (T, torch.float32, random_experts("gptq4-g32", E, H, INNER), SILU),
        (T, torch.bfloat16, with_biases(), Activation("clamped_swiglu")),
        (0, torch.float16, random_experts("mxfp4", E, H, INNER, gated=False), Activation("relu2")),
    ):
        x = numbers(tokens, H, dtype=dtype)
        ids, scores = random_routing(tokens, K, E)
        offsets, rows, positions = ops.plan_sort(ids, E)
        y1 = ops.grouped_gate_up(x, offsets, rows, K, *packed(weights.gate_up))
        h = ops.activation(y1, activation.kind, activation.alpha, activation.limit)
        y2 = ops.grouped_down(h, offsets, *packed(weights.down))
        calls.append(
            {
                "plan_sort": (ids, E),
                "grouped_gate_up": (x, offsets, rows, K, *packed(weights.gate_up)),
                "activation": (y1, activation.kind, activation.alpha, activation.limit),
                "grouped_down": (h, offsets, *packed(weights.down)),
                "combine": (y2[positions.long()], ids, scores, E),
            }[name]
        )
    return calls


@INDUCTOR
@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("name", ops.OPS)
def test_opcheck(name: str, call: int) -> None:
    op = getattr(torch.ops.fanfold, name).default
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments(name)[call], test_utils=checks)


@pytest.mark.parametrize("name", ops.OPS)
def test_fakes_have_the_shapes_and_dtypes_of_the_results(name: str) -> None:
    _, real, fake = ops.OPS[name]
    for call in arguments(name):
        meta = [_to_meta(value) for value in call]
        found, expected = fake(*meta), real(*call)
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
    found = composed(x, ids, scores, packed(weights.gate_up), packed(weights.down), SILU)
    assert torch.equal(found, layer(x, ids, scores, weights, SILU))


def test_the_ops_together_with_biases() -> None:
    weights, activation = with_biases(), Activation("clamped_swiglu")
    x = numbers(T, H)
    ids, scores = random_routing(T, K, E)
    found = composed(x, ids, scores, packed(weights.gate_up), packed(weights.down), activation)
    assert torch.equal(found, layer(x, ids, scores, weights, activation))


@INDUCTOR
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_for_any_number_of_tokens(backend: str) -> None:
    weights = random_experts("gptq4-g32", E, H, INNER)
    gate_up, down = packed(weights.gate_up), packed(weights.down)

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return composed(2 * x, ids, scores, gate_up, down, SILU) + x

    torch._dynamo.reset()
    counter = _Counter(backend)
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for tokens in (5, 9, 33):
        given = numbers(tokens, H), *random_routing(tokens, K, E)
        for tensor in given:
            torch._dynamo.mark_dynamic(tensor, 0)  # an error where something fixes the number of tokens
        assert torch.equal(compiled(*given), run(*given))
    assert counter.calls == 1


@INDUCTOR
def test_compiled_with_every_size_dynamic() -> None:
    weights = random_experts("gptq4-g32", E, H, INNER)
    gate_up, down = packed(weights.gate_up), packed(weights.down)

    def run(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return composed(x, ids, scores, gate_up, down, SILU)

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
run = torch.compile(lambda ids: torch.ops.fanfold.plan_sort(ids, 3)[1] + 1, fullgraph=True, backend="aot_eager")
print(run(ids).tolist())
"""


def test_the_first_compile_of_a_process() -> None:
    run = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.strip() == "[2, 3, 1, 4]", run.stderr


@pytest.mark.parametrize("name", [name for name in ops.OPS if name != "plan_sort"])
def test_backward_raises(name: str) -> None:
    first, *rest = arguments(name)[0]
    out = getattr(torch.ops.fanfold, name)(first.clone().requires_grad_(), *rest)
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
    found = composed(x, ids, scores, packed(experts.weights.gate_up), packed(experts.weights.down), SILU)
    assert torch.equal(found, experts(x, ids, scores))
