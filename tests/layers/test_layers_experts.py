"""Experts as a module: arguments, casts, copies, adapters of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from fanfold import AdapterPool, Experts, load_experts
from fanfold.errors import ArgumentError, InferenceOnlyError, UnavailableError
from fanfold.formats.codec import dequantize_expert
from fanfold.layers.reference import layer
from fanfold.spec import Activation, ExpertWeights
from samples import SILU, numbers, random_experts, random_pairs, random_routing, relative_error, sample

E, H, INNER, T, K = 6, 64, 32, 9, 2
FORMATS = ["bf16", "gptq4-g32-asym-v2-actorder", "awq4-g32-asym", "nvfp4", "mxfp4", "fp8-channel"]


def module(name: str = "gptq4-g32", dtype: torch.dtype = torch.float32) -> Experts:
    return Experts(random_experts(name, E, H, INNER), SILU, dtype=dtype)


def call(tokens: int = T) -> dict[str, Tensor]:
    ids, weights = random_routing(tokens, K, E)
    return {"hidden": numbers(tokens, H), "topk_ids": ids, "topk_weights": weights}


def tensors_of(weights: ExpertWeights) -> dict[str, Tensor]:
    up, down = weights.gate_up, weights.down
    return {f"up.{n}": t for n, t in up.tensors.items()} | {f"down.{n}": t for n, t in down.tensors.items()}


def assert_same(found: ExpertWeights, expected: dict[str, Tensor]) -> None:
    assert tensors_of(found).keys() == expected.keys()
    for name, tensor in tensors_of(found).items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward_is_the_reference_layer(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    experts, given = module(dtype=dtype), call()
    given["hidden"] = given["hidden"].to(dtype)
    given["topk_ids"] = given["topk_ids"].to(ids_dtype)
    found = experts(**given)
    assert found.dtype == dtype
    assert found.shape == (T, H)
    expected = layer(given["hidden"], given["topk_ids"], given["topk_weights"], experts.weights, SILU)
    assert torch.equal(found, expected)


def test_no_tokens() -> None:
    assert module()(**call(0)).shape == (0, H)


WRONG: dict[str, tuple[str, Any, str, str]] = {
    "hidden width": ("hidden", numbers(T, H + 1), f"float32 [{T}, {H + 1}] on cpu", f"[{T}, {H}]"),
    "hidden 3-D": ("hidden", numbers(1, T, H), f"float32 [1, {T}, {H}] on cpu", f"[1, {H}]"),
    "hidden dtype": ("hidden", numbers(T, H).double(), "float64", "bfloat16 or float16 or float32"),
    "hidden scalar": ("hidden", torch.tensor(1.0), "float32 [] on cpu", f"[0, {H}]"),
    "ids tokens": ("topk_ids", torch.zeros(T + 1, K).long(), f"int64 [{T + 1}, {K}]", f"[{T}, {K}]"),
    "ids 1-D": ("topk_ids", torch.zeros(T).long(), f"int64 [{T}]", f"[{T}, 0]"),
    "ids dtype": ("topk_ids", torch.zeros(T, K), "float32", "int32 or int64"),
    "weights slots": ("topk_weights", torch.zeros(T, K + 1), f"float32 [{T}, {K + 1}]", f"[{T}, {K}]"),
    "weights dtype": ("topk_weights", torch.zeros(T, K).long(), "int64", "bfloat16 or float16 or float32"),
    "weights device": ("topk_weights", torch.zeros(T, K, device="meta"), "on meta", "on cpu"),
    "adapters length": ("adapter_ids", torch.zeros(T + 1).int(), f"int32 [{T + 1}]", f"[{T}]"),
    "adapters dtype": ("adapter_ids", torch.zeros(T), "float32", "int32 or int64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_by_name(case: str) -> None:
    name, value, found, expected = WRONG[case]
    with pytest.raises(ArgumentError) as caught:
        module()(**{**call(), name: value})
    assert caught.value.what == f"Experts.forward: {name}"
    assert found in caught.value.found
    assert expected in caught.value.expected


def test_implementations() -> None:
    weights = random_experts("bf16", E, H, INNER)
    assert Experts(weights, SILU, dtype=torch.float32).implementation == "reference"
    assert Experts(weights, SILU, dtype=torch.float32, implementation="reference").implementation == "reference"
    with pytest.raises(ArgumentError, match="implementation: found 'nope'"):
        Experts(weights, SILU, dtype=torch.float32, implementation="nope")


def test_repr_says_what_it_holds() -> None:
    assert repr(module()) == f"Experts(gptq4-g32, E={E}, H={H}, I={INNER}, silu, implementation=reference)"
    relu2 = Experts(random_experts("bf16", gated=False), Activation("relu2"), dtype=torch.float32)
    assert "relu2" in repr(relu2)


CASTS = {
    "to dtype": lambda m: m.to(torch.float16),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to cpu": lambda m: m.to("cpu"),
    "to both": lambda m: m.to("cpu", torch.float64),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_stay_as_they_are(name: str, cast: str) -> None:
    experts = module(name)
    experts.pairs = {name: dict(of) for name, of in random_pairs(experts.weights, 1).items()}
    before = {name: tensor.clone() for name, tensor in tensors_of(experts.weights).items()}
    expected = experts(**call(), adapter_ids=torch.zeros(T).int())
    after = CASTS[cast](experts)
    assert_same(after.weights, before)
    assert torch.equal(after(**call(), adapter_ids=torch.zeros(T).int()), expected)


def test_a_copy_shares_nothing() -> None:
    experts = module("bf16")
    twin = copy.deepcopy(experts)
    for name, tensor in tensors_of(twin.weights).items():
        assert tensor.data_ptr() != tensors_of(experts.weights)[name].data_ptr()
    twin.put(0, {("down", 0): random_pairs(experts.weights, 1)["down"][0, 0]})
    assert experts.pairs["down"] == {}


def test_biases_move_along() -> None:
    experts = load_experts(sample("base_gptoss_tiny_bf16"))
    bias = experts.weights.down.bias
    assert bias is not None
    experts.half()
    assert experts.weights.down.bias is not None
    assert torch.equal(experts.weights.down.bias, bias)
    assert experts.weights.down.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["gptq4-g32", "fp8-channel"])
def test_casts_that_mean_packed_words_too_are_refused(name: str) -> None:
    experts = module(name)
    with pytest.raises(ArgumentError, match="a cast to float16; expected weights that stay"):
        experts.type(torch.float16)
    assert experts(**call()).shape == (T, H)


def test_meta_device_has_no_bytes() -> None:
    assert module().to("meta").weights.down.tensors["qweight"].device.type == "meta"


@pytest.mark.parametrize("name", ["hidden", "topk_weights"])
def test_backward_raises(name: str) -> None:
    given = call()
    given[name].requires_grad_()
    out = module()(**given)
    assert out.requires_grad
    with pytest.raises(InferenceOnlyError, match=r"torch\.inference_mode"):
        out.sum().backward()
    assert given[name].grad is None


def test_no_gradient_asked_for() -> None:
    given = call()
    assert not module()(**given).requires_grad
    given["hidden"].requires_grad_()
    with torch.no_grad():
        assert not module()(**given).requires_grad
    with torch.inference_mode():
        assert torch.equal(module()(**given), module()(**call()))


def test_slots_are_filled_and_emptied() -> None:
    experts, given = module(), call()
    base = experts(**given)
    pairs = random_pairs(experts.weights, 2)
    for slot in range(2):
        experts.put(slot, {(p, e): pairs[p][slot, e] for p in ("gate", "up", "down") for e in range(E)})
    both = experts(**given, adapter_ids=torch.arange(T).int() % 2)
    assert torch.equal(both, layer(*given.values(), experts.weights, SILU, pairs, torch.arange(T) % 2))
    assert torch.equal(experts(**given), base)
    assert torch.equal(experts(**given, adapter_ids=torch.full((T,), -1)), base)
    assert torch.equal(experts(**given, adapter_ids=torch.full((T,), 7)), base)  # a slot that holds nothing
    experts.put(0, {("down", 2): pairs["down"][1, 2]})
    only = experts(**given, adapter_ids=torch.zeros(T).int())
    touched = (given["topk_ids"] == 2).any(-1)
    assert torch.equal(only[~touched], base[~touched])
    assert not torch.isclose(only[touched], base[touched]).all(-1).any()
    experts.drop(0)
    experts.drop(1)
    experts.drop(5)
    assert experts.pairs == {"gate": {}, "up": {}, "down": {}}


def test_a_pool_of_one_layer() -> None:
    """Its `using` has an entry for each token; an adapter's other layers and attention are left out."""
    experts = load_experts(sample("base_qwen3moe_tiny_bf16"), layer=1, dtype=torch.float32)
    pool = AdapterPool(experts, slots=2)
    pool.load("fused", sample("peft_qwen3moe_target_parameters"))
    pool.load("all", sample("peft_qwen3moe_all_linear"))
    ids, weights = random_routing(T, 2, experts.shape.num_experts)
    given = numbers(T, experts.shape.hidden), ids, weights
    base = experts(*given)
    names = ["fused", None, "all", "base", "fused", None, None, "all", "all"]
    with pool.using(names):
        mixed = experts(*given)
        assert torch.equal(experts(*given, adapter_ids=torch.full((T,), -1)), base)
    slots = torch.tensor([-1 if name in (None, "base") else pool.slot(name) for name in names])
    assert torch.equal(mixed, experts(*given, adapter_ids=slots))
    assert torch.equal(mixed[slots < 0], base[slots < 0])
    assert not torch.isclose(mixed, base).all(-1)[slots >= 0].any()
    assert torch.equal(experts(*given), base)
    with pool.using(["fused"]), pytest.raises(ArgumentError, match=f"1 names for {T} tokens"):
        experts(*given)


def test_a_new_pool_takes_the_place_of_the_last() -> None:
    """Of the old one's adapters nothing is left, in slots that both have and beside them."""
    experts = load_experts(sample("base_qwen3moe_tiny_bf16"), dtype=torch.float32)
    given = numbers(T, experts.shape.hidden), *random_routing(T, 2, experts.shape.num_experts)
    old = AdapterPool(experts)
    old.load("all", sample("peft_v4_qwen3moe_per_expert"))
    new = AdapterPool(experts, slots=2)
    assert new.names() == []
    assert experts.pairs == {"gate": {}, "up": {}, "down": {}}
    for call in (old.unload, old.slot, lambda name: old.load("b", sample("peft_qwen3moe_target_parameters"))):
        with pytest.raises(ArgumentError, match="a pool whose place another has taken"):
            call("all")
    with pytest.raises(ArgumentError, match="a pool whose place"), old.using(["all"] * T):
        pass
    new.load("all", sample("peft_v4_qwen3moe_per_expert"))
    with new.using(["all"] * T):
        found = experts(*given)
    twin = copy.deepcopy(experts)  # with its adapters, and without a pool
    assert torch.equal(twin(*given, adapter_ids=torch.zeros(T).int()), found)
    AdapterPool(twin)
    assert torch.equal(twin(*given, adapter_ids=torch.zeros(T).int()), experts(*given))
    with new.using(["all"] * T):
        assert torch.equal(experts(*given), found)


def test_arch_of_a_device_that_runs_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanfold.layers.experts.arch_of", lambda device: "sm_75")
    weights = random_experts("bf16", E, H, INNER)
    with pytest.raises(UnavailableError, match="expert layer on sm_75"):
        Experts(weights, SILU, dtype=torch.float32)
    assert Experts(weights, SILU, dtype=torch.float32, implementation="reference").requested == "reference"


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "fp8-block32x32"])
def test_activations_in_8_bits(name: str) -> None:
    """Both products of a token read E4M3 numbers times a scale; one expert, written out."""
    experts = Experts(random_experts(name, 1, H, INNER), SILU, dtype=torch.bfloat16, activation_format="fp8")
    x = numbers(1, H, dtype=torch.bfloat16)
    one, sure = torch.zeros(1, 1).int(), torch.ones(1, 1)

    def quantized(row: Tensor, group: int) -> Tensor:
        groups = row.float().view(-1, group)
        scale = groups.abs().amax(1, keepdim=True) / 448
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(1, -1)

    group = 32 if "block" in name else None
    gate, up = (dequantize_expert(experts.weights.gate_up, 0, p) for p in (0, 1))
    x8 = quantized(x, group or H)
    y1 = [(x8 @ w.T).bfloat16().float() for w in (gate, up)]
    h8 = quantized((torch.nn.functional.silu(y1[0]) * y1[1]).bfloat16(), group or INNER)
    expected = (h8 @ dequantize_expert(experts.weights.down, 0, 0).T).bfloat16()
    found = experts(x, one, sure)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    as_they_are = Experts(experts.weights, SILU, dtype=torch.bfloat16)(x, one, sure)
    assert relative_error(found, expected) < 4e-3
    assert 5e-3 < relative_error(found, as_they_are) < 0.1
