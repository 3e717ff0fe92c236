"""The layer: transformers' own experts as oracle, batch invariance, low precision, adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fanfold.layers.reference import layer
from fanfold.spec import Activation, ExpertWeights, LoraPair, WeightFormat
from fanfold.spec.weights import ProjectionWeights
from samples import (
    SILU,
    dense,
    numbers,
    random_experts,
    random_pairs,
    random_routing,
    relative_error,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = ["bf16", "gptq4-g32", "nvfp4"]
E, H, INNER, T, K = 6, 64, 32, 37, 3
GELU = {"hidden_act": "gelu_pytorch_tanh"}
THEIRS: dict[str, tuple[type[nn.Module], Any, Activation]] = {
    "qwen3_moe": (Qwen3MoeExperts, Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=INNER, num_experts=E), SILU),
    "gelu_tanh": (
        Qwen3MoeExperts,
        Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=INNER, num_experts=E, **GELU),
        Activation("gelu_tanh"),
    ),
    "mixtral": (MixtralExperts, MixtralConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=E), SILU),
    "gpt_oss": (
        GptOssExperts,
        GptOssConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=E),
        Activation("clamped_swiglu"),
    ),
    "nemotron_h": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=H, moe_intermediate_size=INNER, n_routed_experts=E),
        Activation("relu2"),
    ),
}


def theirs(name: str, size: float = 1.0) -> tuple[nn.Module, ExpertWeights]:
    """transformers' module with random weights, and the same weights as fanfold keeps them."""
    cls, config, _ = THEIRS[name]
    config._experts_implementation = "eager"
    module: Any = cls(config)
    for at, parameter in enumerate(module.parameters()):
        parameter.data = size * numbers(*parameter.shape, seed=at) / parameter.shape[-1] ** 0.5
    up = module.gate_up_proj if module.has_gate else module.up_proj
    down = module.down_proj
    if module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    halves = 2 if module.has_gate else 1

    def split(rows: Tensor) -> Tensor:
        if module.is_concatenated:
            return rows.unflatten(1, (halves, INNER))
        return rows.unflatten(1, (INNER, halves)).transpose(1, 2)

    biases = (split(module.gate_up_proj_bias), module.down_proj_bias[:, None]) if module.has_bias else (None, None)
    fmt = WeightFormat.parse("fp32")
    return module, ExpertWeights(
        ProjectionWeights(fmt, INNER, H, {"weight": split(up.detach()).contiguous()}, biases[0]),
        ProjectionWeights(fmt, H, INNER, {"weight": down.detach()[:, None].contiguous()}, biases[1]),
    )


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", THEIRS)
def test_equals_transformers_experts(name: str, ids_dtype: torch.dtype) -> None:
    # values of about 4 go beyond gpt-oss's limit of 7 here and there
    module, weights = theirs(name, size=4.0)
    x = numbers(T, H)
    ids, scores = random_routing(T, K, E)
    with torch.no_grad():
        expected = module(x, ids, scores)
        found = layer(x, ids.to(ids_dtype), scores, weights, THEIRS[name][2])
    assert relative_error(found, expected) <= 1e-6
    assert expected.std() > 0.1


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "name", ["bf16", "fp16", "gptq4-g32-asym-v1-actorder", "nvfp4-divisor", "mxfp4", "fp8-channel"]
)
def test_equals_a_plain_loop_over_tokens(name: str, gated: bool) -> None:
    weights = random_experts(name, E, H, INNER, gated=gated)
    up, down = (w.double() for w in dense(weights))
    x = numbers(T, H)
    ids, scores = random_routing(T, K, E)
    expected = torch.zeros(T, H, dtype=torch.float64)
    for token in range(T):
        for slot in range(K):
            e = int(ids[token, slot])
            y = [w @ x[token].double() for w in up[e]]
            h = silu(y[0]) * y[1] if gated else torch.relu(y[0]).square()
            expected[token] += scores[token, slot].double() * (down[e] @ h)
    found = layer(x, ids, scores, weights, SILU if gated else Activation("relu2"))
    assert relative_error(found, expected) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_low_precision_is_no_worse_than_a_plain_evaluation(name: str, dtype: torch.dtype) -> None:
    """Both against fp64: torch's own products in `dtype`, with the weights rounded to it, and ours."""
    weights = random_experts(name, E, H, INNER)
    up, down = dense(weights)
    x = numbers(T, H, dtype=dtype)
    ids, scores = random_routing(T, K, E)
    plain, exact = torch.zeros(T, H, dtype=dtype), torch.zeros(T, H, dtype=torch.float64)
    for token in range(T):
        for slot in range(K):
            e = int(ids[token, slot])
            for out in (plain, exact):
                gate, value = (w.to(out.dtype) @ x[token].to(out.dtype) for w in up[e])
                h = silu(gate) * value
                out[token] += scores[token, slot].to(out.dtype) * (down[e].to(out.dtype) @ h)
    found = layer(x, ids, scores, weights, SILU)
    assert found.dtype == dtype
    assert relative_error(found, exact) <= relative_error(plain, exact)
    assert relative_error(found, exact) <= 2 * torch.finfo(dtype).eps


def test_weights_of_the_router_stay_fp32_beside_bf16_activations() -> None:
    """Their product with y2 is fp32: rounding the weights first gives other bits."""
    weights = random_experts("bf16", E, H, INNER)
    x = numbers(T, H, dtype=torch.bfloat16)
    ids, scores = random_routing(T, K, E)
    found = layer(x, ids, scores, weights, SILU)
    rounded = layer(x, ids, scores.bfloat16(), weights, SILU)
    assert not torch.equal(found, rounded)
    assert torch.equal(rounded, layer(x, ids, scores.bfloat16().float(), weights, SILU))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_f_a_row_does_not_depend_on_the_batch(name: str, dtype: torch.dtype) -> None:
    """Promise (f): not on how many rows there are, nor on where they lie, nor on what the others hold."""
    weights = random_experts(name, E, H, INNER)
    pairs = random_pairs(weights, slots=3, dtype=dtype)
    x = numbers(T, H, dtype=dtype)
    ids, scores = random_routing(T, K, E)
    slots = torch.arange(T) % 4 - 1
    whole = layer(x, ids, scores, weights, SILU, pairs, slots)
    for size in (1, 2, 15, 16, 17, 33):
        part = layer(x[:size], ids[:size], scores[:size], weights, SILU, pairs, slots[:size])
        assert torch.equal(part, whole[:size])
    order = torch.randperm(T, generator=torch.Generator().manual_seed(1))
    mixed = layer(x[order], ids[order], scores[order], weights, SILU, pairs, slots[order])
    assert torch.equal(mixed, whole[order])
    spoilt = x.clone()
    spoilt[1::2] = float("nan")
    found = layer(spoilt, ids, scores, weights, SILU, pairs, slots)
    assert torch.equal(found[::2], whole[::2])
    assert found[1::2].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_c_d_rows_do_not_depend_on_the_adapters_of_others(dtype: torch.dtype) -> None:
    weights = random_experts("gptq4-g32", E, H, INNER)
    pairs = random_pairs(weights, slots=3, dtype=dtype)
    x = numbers(T, H, dtype=dtype)
    ids, scores = random_routing(T, K, E)
    base = layer(x, ids, scores, weights, SILU)
    slots = torch.arange(T) % 4 - 1
    mixed = layer(x, ids, scores, weights, SILU, pairs, slots)
    assert torch.equal(mixed[slots < 0], base[slots < 0])
    for slot in range(3):
        alone = layer(x, ids, scores, weights, SILU, pairs, torch.full((T,), slot))
        assert torch.equal(mixed[slots == slot], alone[slots == slot])
        assert not torch.equal(alone[slots == slot], base[slots == slot])


def test_a_run_to_run_the_same_bits() -> None:
    weights = random_experts("mxfp4", E, H, INNER)
    x = numbers(T, H, dtype=torch.bfloat16)
    ids, scores = random_routing(T, K, E)
    first = layer(x, ids, scores, weights, SILU)
    assert all(torch.equal(layer(x, ids, scores, weights, SILU), first) for _ in range(3))


@pytest.mark.parametrize("name", ["bf16", "gptq4-g32", "fp8-block32x32"])
def test_adapters_equal_merged_weights(name: str) -> None:
    """Gate and up deltas before the activation, down's before the weighting."""
    weights = random_experts(name, E, H, INNER)
    pairs = random_pairs(weights, slots=1)
    up, down = dense(weights)
    for e in range(E):
        for half, projection in enumerate(("gate", "up")):
            up[e, half] += _delta(pairs[projection][0, e])
        down[e] += _delta(pairs["down"][0, e])
    fmt = WeightFormat.parse("fp32")
    merged = ExpertWeights(
        ProjectionWeights(fmt, INNER, H, {"weight": up}), ProjectionWeights(fmt, H, INNER, {"weight": down[:, None]})
    )
    x = numbers(T, H)
    ids, scores = random_routing(T, K, E)
    found = layer(x, ids, scores, weights, SILU, pairs, torch.zeros(T, dtype=torch.int32))
    expected = layer(x, ids, scores, merged, SILU)
    assert relative_error(found, expected) <= 1e-6
    assert relative_error(layer(x, ids, scores, weights, SILU), expected) > 0.1


def _delta(pair: LoraPair) -> Tensor:
    return pair.scale * pair.b @ pair.a


@pytest.mark.parametrize("name", FORMATS)
def test_ids_outside_add_nothing(name: str) -> None:
    weights = random_experts(name, E, H, INNER)
    x = numbers(T, H)
    ids, scores = random_routing(T, K, E)
    away = ids.clone()
    away[:, 1] = torch.tensor([-1, E, -7, 2**40])[torch.arange(T) % 4]
    found = layer(x, away, scores, weights, SILU)
    muted = scores.clone()
    muted[:, 1] = 0.0
    assert torch.equal(found, layer(x, ids, muted, weights, SILU))
    assert torch.equal(layer(x, torch.full_like(ids, -1), scores, weights, SILU), torch.zeros(T, H))


def test_no_tokens_no_slots_and_experts_without_rows() -> None:
    weights = random_experts("bf16", E, H, INNER)
    pairs = random_pairs(weights, slots=1)
    none, empty = torch.empty(0, K, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    assert layer(numbers(0, H), none, none.float(), weights, SILU, pairs, empty).shape == (0, H)
    no_slots = torch.empty(T, 0, dtype=torch.int64)
    assert torch.equal(layer(numbers(T, H), no_slots, no_slots.float(), weights, SILU), torch.zeros(T, H))
    x, one = numbers(T, H), torch.full((T, 1), 4)
    alone = ExpertWeights(_one(weights.gate_up), _one(weights.down))
    found = layer(x, one, torch.ones(T, 1), weights, SILU)
    assert torch.equal(found, layer(x, torch.zeros_like(one), torch.ones(T, 1), alone, SILU))


def _one(projection: ProjectionWeights) -> ProjectionWeights:
    tensors = {name: tensor[4:5] for name, tensor in projection.tensors.items()}
    return ProjectionWeights(projection.format, projection.n, projection.k, tensors)
