"""bind: every target at its place, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import (
    EXPERTS,
    GOLDEN,
    QUERY,
    TINY,
    FakeExperts,
    FakeLinear,
    FakeSite,
    factors,
    gpt_oss,
    mixtral,
    names,
    qwen3,
    sites,
    tiny,
    write,
)

from fanfold.errors import AdapterMismatchError
from fanfold.lora import bind, read_adapter
from fanfold.lora.site import ExpertSite, LinearSite, Site
from fanfold.spec import ExpertShape, LoraPair

SHAPE = ExpertShape(3, 6, 4)
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def small(**fields: Any) -> dict[str, FakeSite]:
    return sites(2, SHAPE, {"self_attn.q_proj": (6, 8), "mlp.gate": (6, 3)}, **fields)


def bound(folder: Path, tensors: dict[str, torch.Tensor], places: dict[str, FakeSite], **fields: Any) -> dict[str, Any]:
    return bind(read_adapter(write(folder, tensors, **fields)), places)


def test_fakes_are_sites() -> None:
    experts = FakeExperts(EXPERTS, shape=SHAPE)
    linear = FakeLinear(QUERY, in_features=6, out_features=8)
    assert isinstance(experts, Site)
    assert isinstance(experts, ExpertSite)
    assert not isinstance(experts, LinearSite)
    assert isinstance(linear, LinearSite)
    assert not isinstance(linear, ExpertSite)
    assert not isinstance(object(), Site)


def test_a_linear_and_a_router(tmp_path: Path) -> None:
    gate = "model.layers.1.mlp.gate"
    tensors = factors(QUERY, 2, 6, 8) | factors(gate, 2, 6, 3, 1)
    found = bound(tmp_path, tensors, small())
    assert found.keys() == {QUERY, gate}
    assert isinstance(found[QUERY], LoraPair)
    assert torch.equal(found[QUERY].a, tensors[names(QUERY)[0]])
    assert torch.equal(found[gate].b, tensors[names(gate)[1]])
    assert found[QUERY].scale == 2.0


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"])
def test_a21_one_projection_of_one_expert(tmp_path: Path, name: str) -> None:
    projection = {"w1": "gate", "w2": "down", "w3": "up"}.get(name, name.removesuffix("_proj"))
    inputs, outputs = (4, 6) if projection == "down" else (6, 4)
    tensors = factors(f"{EXPERTS}.2.{name}", 2, inputs, outputs)
    found = bound(tmp_path, tensors, small())
    assert found.keys() == {EXPERTS}
    assert found[EXPERTS].keys() == {(projection, 2)}
    pair = found[EXPERTS][projection, 2]
    assert torch.equal(pair.b, tensors[names(f"{EXPERTS}.2.{name}")[1]])


def test_a21_only_gate_up_or_only_down_of_fused_experts(tmp_path: Path) -> None:
    found = bound(tmp_path, factors(EXPERTS, 6, 6, 8), small(), target_parameters=BOTH[:1])
    assert found[EXPERTS].keys() == {(half, e) for half in ("gate", "up") for e in range(3)}
    found = bound(tmp_path, factors(EXPERTS, 6, 4, 6), small(), target_parameters=BOTH[1:])
    assert found[EXPERTS].keys() == {("down", e) for e in range(3)}


def test_a10_a12_ranks_of_all_sizes(tmp_path: Path) -> None:
    for rank in (1, 2, 3, 4, 5, 8, 12, 16, 24, 48, 64, 100, 128, 256, 320, 512):
        tensors = factors(f"{EXPERTS}.0.up_proj", rank, 6, 4)
        pair = bound(tmp_path, tensors, small(), r=rank)[EXPERTS]["up", 0]
        assert pair.rank == rank
        assert torch.equal(pair.a, tensors[names(f"{EXPERTS}.0.up_proj")[0]])


def test_a12_unlike_ranks_in_one_adapter(tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for expert, rank in enumerate((1, 7, 16)):
        tensors |= factors(f"{EXPERTS}.{expert}.down_proj", rank, 4, 6, expert)
    found = bound(tmp_path, tensors, small(), rank_pattern={r"0\.down_proj": 1, r"1\.down_proj": 7}, r=16)
    assert [found[EXPERTS]["down", e].rank for e in range(3)] == [1, 7, 16]
    assert [found[EXPERTS]["down", e].scale for e in range(3)] == [4.0, 4 / 7, 0.25]


def test_a20_one_expert_too_many(tmp_path: Path) -> None:
    with pytest.raises(AdapterMismatchError, match="expert 3; expected experts 0 to 2") as caught:
        bound(tmp_path, factors(f"{EXPERTS}.3.up_proj", 2, 6, 4), small())
    assert caught.value.what == f"{EXPERTS}.3.up_proj"
    with pytest.raises(AdapterMismatchError, match="factors of 4 experts"):
        bound(tmp_path, factors(EXPERTS, 8, 4, 6), small(), target_parameters=BOTH[1:])


MISMATCHES = [
    (QUERY, (6, 9), {}, r"lora_B \[9, 2\]; expected lora_A \[2, 6\] and lora_B \[8, 2\]"),
    (QUERY, (7, 8), {}, r"lora_A \[2, 7\]"),
    (f"{EXPERTS}.0.up_proj", (4, 6), {}, r"expected lora_A \[2, 6\] and lora_B \[4, 2\]"),
    (f"{EXPERTS}.0.down_proj", (6, 4), {}, r"expected lora_A \[2, 4\] and lora_B \[6, 2\]"),
    ("model.layers.2.self_attn.q_proj", (6, 8), {}, "no such module in the model"),
    ("model.layers.0.self_attn.k_proj", (6, 8), {}, r"nearest are model\.layers\.0\.self_attn\.q_proj"),
    (f"{QUERY}.0.up_proj", (6, 4), {}, "no such module"),
    ("model.layers.2.mlp.experts.0.up_proj", (6, 4), {}, r"nearest are model\.layers\.[01]\.mlp\.experts"),
    ("model.layers.0.mlp.shared_experts.up_proj", (6, 4), {}, "no such module"),
]


@pytest.mark.parametrize(("module", "sizes", "fields", "text"), MISMATCHES, ids=[f"{m[0]}-{m[1]}" for m in MISMATCHES])
def test_an_adapter_for_another_model(
    tmp_path: Path, module: str, sizes: tuple[int, int], fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(AdapterMismatchError, match=text) as caught:
        bound(tmp_path, factors(QUERY, 2, 6, 8) | factors(module, 2, *sizes), small(), **fields)
    assert caught.value.what.startswith(module)


def test_gate_of_experts_without_one(tmp_path: Path) -> None:
    places = sites(1, ExpertShape(3, 6, 4, gated=False), {})
    assert bound(tmp_path, factors(f"{EXPERTS}.0.up_proj", 2, 6, 4), places)[EXPERTS].keys() == {("up", 0)}
    with pytest.raises(AdapterMismatchError, match="expected experts with a gate projection"):
        bound(tmp_path, factors(f"{EXPERTS}.0.gate_proj", 2, 6, 4), places)


def test_kinds_of_sites(tmp_path: Path) -> None:
    linear = FakeLinear(EXPERTS, in_features=6, out_features=8)
    with pytest.raises(AdapterMismatchError, match="which is not that; expected experts"):
        bound(tmp_path, factors(f"{EXPERTS}.0.up_proj", 2, 6, 4), {EXPERTS: linear})
    with pytest.raises(AdapterMismatchError, match="which is not that; expected experts"):
        bound(tmp_path, factors(EXPERTS, 6, 6, 8), {EXPERTS: linear}, target_parameters=BOTH[:1])
    with pytest.raises(AdapterMismatchError, match="expected a Linear"):
        bound(tmp_path, factors(QUERY, 2, 6, 8), {QUERY: FakeExperts(QUERY, shape=SHAPE)})


def test_two_targets_that_mean_the_same_weight(tmp_path: Path) -> None:
    two = factors(f"{EXPERTS}.0.w1", 2, 6, 4) | factors(f"{EXPERTS}.0.gate_proj", 2, 6, 4)
    with pytest.raises(AdapterMismatchError, match=r"a second pair for \('gate', 0\)"):
        bound(tmp_path, two, small())
    two = factors(QUERY, 2, 6, 8) | factors("layers.0.self_attn.q_proj", 2, 6, 8)
    with pytest.raises(AdapterMismatchError, match="a second pair"):
        bound(tmp_path, two, small())
    two = factors(f"{EXPERTS}.0.up_proj", 2, 6, 4) | factors(EXPERTS, 6, 6, 8)
    with pytest.raises(AdapterMismatchError, match=r"a second pair for \('up', 0\)"):
        bound(tmp_path, two, small(), target_parameters=BOTH[:1])


def test_other_spellings_of_paths(tmp_path: Path) -> None:
    tensors = factors("model.layers.1.block_sparse_moe.experts.0.w1", 2, 6, 4) | factors(QUERY, 2, 6, 8)
    found = bound(tmp_path, tensors, small(prefix="model.language_model.layers"))
    assert found.keys() == {
        "model.language_model.layers.1.mlp.experts",
        "model.language_model.layers.0.self_attn.q_proj",
    }


def test_partial_takes_what_belongs_to_one_layer(tmp_path: Path) -> None:
    tensors = factors(QUERY, 2, 6, 8)
    for layer in (0, 1):
        tensors |= factors(f"model.layers.{layer}.mlp.experts.0.up_proj", 2, 6, 4, layer)
    adapter = read_adapter(write(tmp_path, tensors))
    second = "model.layers.1.mlp.experts"
    places = {second: small()[second]}
    with pytest.raises(AdapterMismatchError, match="no such module"):
        bind(adapter, places)
    found = bind(adapter, places, partial=True)
    assert found.keys() == {second}
    pairs = found[second]
    assert not isinstance(pairs, LoraPair)
    assert torch.equal(pairs["up", 0].a, tensors[names(f"{second}.0.up_proj")[0]])


def test_partial_needs_at_least_one(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, factors(QUERY, 2, 6, 8)))
    with pytest.raises(AdapterMismatchError, match=r"expected at least one for model\.layers\.1\.mlp\.experts"):
        bind(
            adapter,
            {"model.layers.1.mlp.experts": FakeExperts("model.layers.1.mlp.experts", shape=SHAPE)},
            partial=True,
        )
    with pytest.raises(AdapterMismatchError, match="there are none"):
        bind(adapter, {}, partial=True)


def test_partial_still_checks_shapes(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, factors(f"{EXPERTS}.3.up_proj", 2, 6, 4)))
    with pytest.raises(AdapterMismatchError, match="expert 3"):
        bind(adapter, {EXPERTS: FakeExperts(EXPERTS, shape=SHAPE)}, partial=True)


SAMPLES = {
    # folder: model, pairs in each expert layer, linears in all
    GOLDEN / "peft018_gptoss_target_parameters": (gpt_oss, 12, 0),
    GOLDEN / "peft_gptoss_target_parameters": (gpt_oss, 12, 0),
    GOLDEN / "peft_mixtral_target_parameters": (mixtral, 12, 0),
    GOLDEN / "peft_mixtral_v4style_target_modules": (mixtral, 12, 0),
    GOLDEN / "peft_v4_mixtral_per_expert": (mixtral, 12, 0),
    GOLDEN / "peft_qwen3moe_all_linear": (qwen3, 24, 10),
    GOLDEN / "peft_qwen3moe_target_parameters": (qwen3, 24, 0),
    GOLDEN / "peft_qwen3moe_v4style_target_modules": (qwen3, 24, 0),
    GOLDEN / "peft_v4_qwen3moe_per_expert": (qwen3, 24, 0),
    GOLDEN / "peft_v4_qwen3moe_per_expert_rslora_patterns": (qwen3, 24, 4),
    TINY / "adapter-python": (tiny, 48, 0),
    TINY / "adapter-scripture": (tiny, 48, 0),
    TINY / "adapter-shout": (tiny, 48, 0),
}


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda folder: folder.name)
def test_samples_bind_to_their_models(folder: Path) -> None:
    model, per_layer, linears = SAMPLES[folder]
    found = bind(read_adapter(folder), model())
    layers = [pairs for pairs in found.values() if not isinstance(pairs, LoraPair)]
    assert [len(pairs) for pairs in layers] == [per_layer] * (4 if model is tiny else 2)
    assert len(found) - len(layers) == linears


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda folder: folder.name)
def test_samples_do_not_bind_to_other_models(folder: Path) -> None:
    others = {qwen3: mixtral, mixtral: qwen3, gpt_oss: qwen3, tiny: qwen3}
    with pytest.raises(AdapterMismatchError):
        bind(read_adapter(folder), others[SAMPLES[folder][0]]())
