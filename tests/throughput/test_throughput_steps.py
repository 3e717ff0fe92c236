"""Steps of a decode: with a cache of fixed size, rewound, replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fanfold.integrations.transformers.forward import ModelForward
from fanfold.integrations.transformers.synthetic import synthetic_model
from fanfold.spec import WeightFormat
from fanfold.throughput import steps
from fanfold.throughput.steps import WARM_UP, Step, apart, graphed_decode, prefill, replayed
from tiny_synthetic import TINY

IDS = torch.randint(0, 96, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def forward() -> ModelForward:
    fmt = WeightFormat.parse("gptq4-g32")
    return ModelForward(synthetic_model(TINY, 2, fmt, "fanfold", torch.device("cpu"), torch.float32))


@torch.inference_mode()
def test_a_step_writes_where_the_last_one_left_off(forward: ModelForward) -> None:
    """The same logits as with a cache that grows."""
    step = Step(forward, IDS, 12)
    _, token, cache = prefill(forward, IDS)
    assert torch.equal(token, step.token)
    for place in range(3):
        logits = forward.step(token, cache)
        assert float(apart(step(), logits).max()) < 1e-5
        assert step.fixed.length == 8 + place
        token = logits.argmax(-1, keepdim=True)
    assert torch.equal(token, step.token)


@torch.inference_mode()
def test_a_rewound_step_repeats_itself(forward: ModelForward) -> None:
    step = Step(forward, IDS, 12)
    first = [step().clone() for _ in range(3)]
    step.rewind()
    assert step.fixed.length == 7
    assert all(torch.equal(step(), logits) for logits in first)


@torch.inference_mode()
@pytest.mark.parametrize("wrong", [False, True])
def test_replays_are_compared_from_the_end_of_the_prompt(forward: ModelForward, wrong: bool) -> None:
    step = Step(forward, IDS, 12)
    eager = [step().clone() for _ in range(2)]
    out = torch.empty_like(eager[0])
    places: list[int] = []

    def replay() -> None:
        out.copy_(step())
        places.append(step.fixed.length)
        if wrong and len(places) == 2:
            out[1].mul_(-1)

    found = replayed(step, replay, out, eager, 3)
    assert len(found.seconds) == 3
    assert places == [8, 9, *range(8, 8 + WARM_UP + 3)]
    assert found.difference == pytest.approx(2 if wrong else 0)


def test_a_replay_that_writes_nothing_is_infinitely_off() -> None:
    expected = torch.ones(2, 5)
    assert apart(torch.full((2, 5), torch.nan), expected).tolist() == [torch.inf] * 2
    assert apart(expected * 1.5, expected).tolist() == pytest.approx([0.5] * 2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@torch.inference_mode()
@pytest.mark.parametrize("experts", ["fanfold", "grouped_mm", "batched_mm"])
def test_a_captured_step(experts: str) -> None:
    fmt, device = WeightFormat.parse("gptq4-g32"), torch.device("cuda", 0)
    model = synthetic_model(TINY, 2, fmt, experts, device, torch.bfloat16)
    found = graphed_decode(ModelForward(model), IDS.to(device), 4)
    assert len(found.seconds) == 4
    assert found.difference < steps.SAME


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@torch.inference_mode()
def test_a_captured_step_moves_on_by_itself() -> None:
    fmt, device = WeightFormat.parse("gptq4-g32"), torch.device("cuda", 0)
    forward = ModelForward(synthetic_model(TINY, 2, fmt, "fanfold", device, torch.bfloat16))
    step = Step(forward, IDS.to(device), 12)
    tokens: list[Tensor] = []
    for _ in range(3):
        step()
        tokens.append(step.token.clone())
    step.rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for expected in tokens:
        graph.replay()
        assert torch.equal(step.token, expected)
    assert step.fixed.length == 10
