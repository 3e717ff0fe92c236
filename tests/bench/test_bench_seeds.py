"""Streams for unlike purposes and seeds have nothing in common."""

import torch

from fanfold.bench.batches import random_batch
from fanfold.bench.jobs import LayerShape
from fanfold.bench.seeds import PURPOSES, generator_of
from fanfold.bench.weights import random_experts
from fanfold.spec import ExpertShape, WeightFormat


def test_streams() -> None:
    drawn = [torch.rand(4, generator=generator_of(what, seed)) for what in PURPOSES for seed in range(20)]
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(PURPOSES) * 20
    again = torch.rand(4, generator=generator_of("weights", 0))
    assert torch.equal(again, drawn[0])


def test_hidden_states_are_not_rows_of_the_weights() -> None:
    shape = LayerShape("test", ExpertShape(2, 256, 64), 1)
    cpu = torch.device("cpu")
    hidden = random_batch(shape, 64, "uniform", torch.bfloat16, cpu, 0).hidden.float()
    weights = random_experts(shape, WeightFormat.parse("bf16"), cpu, 0).gate_up.tensors["weight"]
    products = hidden @ weights[0, 0].float().T
    assert 0.7 < float(products.diagonal().std()) < 1.3
    assert float(products.abs().max()) < 6
