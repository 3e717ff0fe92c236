"""The check passes the reference, in every dtype of activations, and no layer that is wrong."""

import pytest
import torch
from broken import LostExperts, NanExperts, ScaledExperts, SlipExperts

from fanfold.bench.batches import random_batch
from fanfold.bench.checking import Check, check
from fanfold.bench.jobs import LayerShape
from fanfold.bench.weights import random_experts
from fanfold.layers.experts import Experts
from fanfold.spec import Activation, ExpertShape, WeightFormat

SHAPE = LayerShape("test", ExpertShape(8, 256, 128), 2)
CPU = torch.device("cpu")


def checked(
    kind: type[Experts] = Experts,
    name: str = "gptq4-g64",
    *,
    shape: LayerShape = SHAPE,
    tokens: int = 40,
    dtype: torch.dtype = torch.bfloat16,
) -> Check:
    weights = random_experts(shape, WeightFormat.parse(name), CPU, 0)
    experts = kind(weights, shape.activation, dtype=dtype, implementation="reference")
    with torch.inference_mode():
        return check(experts, weights, random_batch(shape, tokens, "uniform", dtype, CPU, 1))


@pytest.mark.parametrize("name", ["bf16", "gptq3-g64-actorder", "nvfp4", "mxfp4", "fp8-channel"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_reference_is_right(name: str, tokens: int) -> None:
    found = checked(name=name, tokens=tokens)
    assert found.wrong is None
    assert 1e-3 < found.error <= 1.05 * found.plain_error < 1e-2
    assert found.norm_off < found.error < found.largest < 0.1


def test_in_fp16_all_is_eight_times_smaller() -> None:
    low, high = checked(dtype=torch.bfloat16), checked(dtype=torch.float16)
    assert high.wrong is None
    assert 6 < low.error / high.error < 11
    assert 6 < low.plain_error / high.plain_error < 11


def test_with_biases() -> None:
    shape = LayerShape("test", SHAPE.experts, 4, Activation("clamped_swiglu"), bias=True)
    assert checked(name="mxfp4", shape=shape).wrong is None


@pytest.mark.parametrize(
    ("kind", "sign"),
    [(ScaledExperts, "norm"), (SlipExperts, "one value"), (LostExperts, "relative error"), (NanExperts, "nan")],
)
def test_a_wrong_layer_is_found(kind: type[Experts], sign: str) -> None:
    wrong = checked(kind).wrong
    assert wrong is not None
    assert sign in wrong


def test_each_limit_finds_what_the_others_do_not() -> None:
    scaled, slip = checked(ScaledExperts).wrong, checked(SlipExperts).wrong
    assert scaled is not None
    assert slip is not None
    assert "relative error" not in scaled
    assert "relative error" not in slip
    assert "norm" not in slip
