"""Random packed weights are what their format says, of the size that is meant, and the same for a seed."""

import pytest
import torch

from fanfold.bench.jobs import FORMATS, LayerShape
from fanfold.bench.weights import random_experts
from fanfold.formats.codec import check_matrix, check_values, dequantize_expert, shapes
from fanfold.spec import Activation, ExpertShape, ExpertWeights, WeightFormat

SHAPE = LayerShape("test", ExpertShape(3, 256, 128), 2)
OTHERS = ["fp16", "gptq3-g64-asym-v2", "gptq4-channel-actorder", "packed4-g64-asym-actorder", "nvfp4-divisor"]


def made(name: str, seed: int = 0, shape: LayerShape = SHAPE) -> ExpertWeights:
    return random_experts(shape, WeightFormat.parse(name), torch.device("cpu"), seed)


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
def test_valid_and_of_the_size_of_trained_weights(name: str) -> None:
    weights = made(name)
    assert weights.shape == SHAPE.experts
    for projection in (weights.gate_up, weights.down):
        required = {
            field for field, value in shapes(projection.format, projection.n, projection.k).items() if value.required
        }
        assert set(projection.tensors) == required
        for expert in range(3):
            for half in range(projection.halves):
                matrix = projection.matrix(expert, half)
                check_matrix(projection.format, matrix, projection.n, projection.k, "test")
                check_values(projection.format, matrix, "test")
                size = float(dequantize_expert(projection, expert, half).std()) * projection.k**0.5
                assert 0.4 < size < 1.8, f"expert {expert} half {half}"


@pytest.mark.parametrize("name", ["bf16", "gptq4-g128-asym-v1", "nvfp4", "mxfp4", "fp8-block128x128"])
def test_a_seed_is_one_set_of_weights(name: str) -> None:
    first, again, other = made(name), made(name), made(name, seed=1)
    for field, tensor in first.gate_up.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), again.gate_up.tensors[field].view(torch.uint8))
        assert not torch.equal(tensor.view(torch.uint8), other.gate_up.tensors[field].view(torch.uint8))
    one, two = (dequantize_expert(first.gate_up, expert, 0) for expert in (0, 1))
    assert not torch.equal(one, two)


def test_global_scales_differ_from_expert_to_expert() -> None:
    scales = made("nvfp4").gate_up.tensors["global_scale"]
    assert len(scales.unique()) == 6


def test_gate_and_up_share_an_order_and_experts_do_not() -> None:
    order = made("gptq4-g128-actorder").gate_up.tensors["g_idx"]
    assert torch.equal(order[:, 0], order[:, 1])
    assert not torch.equal(order[0, 0], order[1, 0])
    assert torch.equal(order[0, 0].bincount(), torch.tensor([128, 128]))


def test_biases() -> None:
    weights = made("mxfp4", shape=LayerShape("test", SHAPE.experts, 2, Activation("clamped_swiglu"), bias=True))
    assert weights.gate_up.bias is not None
    assert weights.down.bias is not None
    assert (tuple(weights.gate_up.bias.shape), tuple(weights.down.bias.shape)) == ((3, 2, 128), (3, 1, 256))
    assert float(weights.down.bias.float().abs().max()) > 0.1
    assert made("mxfp4").down.bias is None
