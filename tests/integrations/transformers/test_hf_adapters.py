"""Adapters in mixed batches, against PEFT's own logits and against PEFT itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import PEFT_WARNS, inputs, with_peft
from safetensors.torch import load_file, save_file

import fanfold
from fanfold import AdapterPool
from fanfold.errors import AdapterMismatchError, ArgumentError, TensorError, UnknownAdapterError
from fanfold.verification import verify
from samples import GOLDEN, logits, reference, relative_error, sample

pytestmark = PEFT_WARNS
BASE_OF = {
    "qwen3moe": "base_qwen3moe_tiny_bf16",
    "mixtral": "base_mixtral_tiny_bf16",
    "gptoss": "base_gptoss_tiny_bf16",
}
PEFT = sorted(path.name for path in GOLDEN.glob("peft*") if not path.name.endswith("dora"))
TINY_MOE = ["adapter-scripture", "adapter-shout", "adapter-python"]


def base_of(adapter: str) -> str:
    return next((base for part, base in BASE_OF.items() if part in adapter), "base")


def test_there_are_adapters() -> None:
    assert len(PEFT) >= 10


@pytest.mark.parametrize("adapter", PEFT + TINY_MOE)
def test_rows_equal_peft_and_base_rows_the_base(adapter: str) -> None:
    """The adapter between two base rows, and the reverse. Reached: 6e-7."""
    kept = reference(adapter)
    model = fanfold.load_model(sample(base_of(adapter)), dtype=torch.float32)
    model.adapters.load("it", sample(adapter))
    ids = kept["input_ids"][:1].expand(3, -1)
    without = logits(model, ids)
    assert relative_error(without[0], kept["base_logits"][0]) <= 1e-6
    for names in ([None, "it", None], ["it", "base", "it"]):
        with model.adapters.using(names):
            found = logits(model, ids)
        for row, name in enumerate(names):
            if name == "it":
                assert relative_error(found[row], kept["logits"][0]) <= 1e-5
                assert relative_error(found[row], kept["base_logits"][0]) > 1e-3
            else:
                assert torch.equal(found[row], without[row])
    assert torch.equal(logits(model, ids), without)


def test_three_adapters_in_one_batch() -> None:
    model = fanfold.load_model(sample("base"), dtype=torch.float32)
    ids = reference("adapter-shout")["input_ids"][:1].expand(5, -1)
    for name in TINY_MOE:
        model.adapters.load(name, sample(name))
    order = ["adapter-python", None, "adapter-shout", "adapter-scripture", "adapter-python"]
    with model.adapters.using(order):
        found = logits(model, ids)
    for row, name in enumerate(order):
        kept = reference(name or "adapter-shout")
        assert torch.equal(kept["input_ids"][0], ids[row])
        expected = kept["base_logits" if name is None else "logits"]
        assert relative_error(found[row], expected[0]) <= 1e-5


@pytest.mark.parametrize("name", ["gptq-int4", "nvfp4"])
def test_c_d_rows_do_not_depend_on_the_adapters_of_others(name: str) -> None:
    """Promises (c) and (d) for a whole quantised model, at equal shapes, bit for bit."""
    model = fanfold.load_model(sample(name), dtype=torch.bfloat16)
    for adapter in TINY_MOE:
        model.adapters.load(adapter, sample(adapter))
    ids = torch.arange(4 * 11).view(4, 11) * 17 % 2000
    base = logits(model, ids)
    orders = (["adapter-shout", None, "adapter-python", None], ["adapter-shout", "adapter-python", None, None])
    found: list[Any] = []
    for order in orders:
        with model.adapters.using(order):
            found.append(logits(model, ids))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][3], found[1][3])
    assert torch.equal(found[0][1], base[1])
    assert torch.equal(found[1][2], base[2])
    assert not torch.equal(found[0][0], base[0])
    with model.adapters.using([None] * 4):
        assert torch.equal(logits(model, ids), base)


def test_a1_a2_the_base_is_untouched_before_during_and_after() -> None:
    model = fanfold.load_model(sample("gptqmodel_qwen3moe_w4_g32"), dtype=torch.float32)
    ids = inputs(3, 12)
    base = logits(model, ids)
    model.adapters.load("a", sample("peft_qwen3moe_all_linear"))
    assert torch.equal(logits(model, ids), base)
    with model.adapters.using(["a", "a", "a"]):
        assert not torch.isclose(logits(model, ids), base).all(-1).any()
    assert torch.equal(logits(model, ids), base)
    with model.adapters.using([None, "base", None]):
        assert torch.equal(logits(model, ids), base)
    model.adapters.unload("a")
    assert torch.equal(logits(model, ids), base)
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, torch.nn.Linear))


def test_blocks_nest_and_an_exception_restores() -> None:
    model = fanfold.load_model(sample("base_qwen3moe_tiny_bf16"), dtype=torch.float32)
    model.adapters.load("a", sample("peft_qwen3moe_target_parameters"))
    model.adapters.load("b", sample("peft_qwen3moe_v4style_target_modules"))
    ids = inputs(2, 8)
    base = logits(model, ids)
    with model.adapters.using(["a", "b"]):
        outer = logits(model, ids)
        with model.adapters.using(["b", None]):
            inner = logits(model, ids)
        assert torch.equal(inner[1], base[1])
        with pytest.raises(ZeroDivisionError), model.adapters.using(["b", "b"]):
            raise ZeroDivisionError
        assert torch.equal(logits(model, ids), outer)
        with pytest.raises(UnknownAdapterError), model.adapters.using(["a", "c"]):
            pass
        assert torch.equal(logits(model, ids), outer)
    assert torch.equal(logits(model, ids), base)


def test_others_are_replaced_and_unloaded_while_one_is_in_use() -> None:
    model = fanfold.load_model(sample("base_qwen3moe_tiny_bf16"), dtype=torch.float32)
    model.adapters.load("a", sample("peft_qwen3moe_target_parameters"))
    model.adapters.load("b", sample("peft_qwen3moe_all_linear"))
    ids = inputs(2, 8)
    with model.adapters.using(["a", None]):
        before = logits(model, ids)
        model.adapters.replace("b", sample("peft_v4_qwen3moe_per_expert"))
        assert torch.equal(logits(model, ids), before)
        model.adapters.unload("b")
        model.adapters.load("c", sample("peft_qwen3moe_all_linear"))
        assert torch.equal(logits(model, ids), before)
    with model.adapters.using([None, "c"]):
        assert not torch.isclose(logits(model, ids)[1], before[1]).all(-1).any()


@pytest.mark.parametrize("names", [[], ["a"], ["a", None], ["a", None, None], ["a"] * 5, [None] * 8])
def test_lists_of_another_length_than_the_batch_are_refused(names: list[str | None]) -> None:
    """Divisors and multiples of the batch too: outside generate nothing repeats rows."""
    model = fanfold.load_model(sample("base_qwen3moe_tiny_bf16"), dtype=torch.float32)
    model.adapters.load("a", sample("peft_qwen3moe_target_parameters"))
    ids = inputs(4, 6)
    embeddings = model.get_input_embeddings()(ids)
    calls = [
        lambda: model(input_ids=ids),
        lambda: model(ids),
        lambda: model(inputs_embeds=embeddings),
        lambda: model.model(input_ids=ids),
        lambda: model.generate(input_ids=ids, max_new_tokens=2),
        lambda: model.generate(ids, max_new_tokens=2),
        lambda: model.generate(inputs=ids, max_new_tokens=2),
        lambda: model.generate(inputs_embeds=embeddings, max_new_tokens=2),
    ]
    for call in calls:
        with model.adapters.using(names), pytest.raises(ArgumentError, match=f"{len(names)} names for a batch of 4"):
            call()


def test_the_base_model_alone_knows_its_rows() -> None:
    """Called behind a forward of another shape with as many tokens."""
    model = fanfold.load_model(sample("base_qwen3moe_tiny_bf16"), dtype=torch.float32)
    model.adapters.load("a", sample("peft_qwen3moe_target_parameters"))
    ids = inputs(4, 6)
    with torch.inference_mode(), model.adapters.using(["a", None, None, "a"]):
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        assert torch.equal(model.model(input_ids=ids).last_hidden_state, expected)
    with torch.inference_mode(), model.adapters.using(["a", None]):
        model(input_ids=ids.view(2, 12))
        with pytest.raises(ArgumentError, match="2 names for a batch of 4 rows"):
            model.model(input_ids=ids)


@pytest.mark.parametrize("keep", [1, 3])
def test_lm_head_sees_fewer_positions(keep: int, tmp_path: Path) -> None:
    model, adapter = with_peft("qwen3_moe", tmp_path, ["lm_head"], [])
    with model.adapters.using(["it", None, "it"]):
        whole = logits(model, inputs(3))
        kept = logits(model, inputs(3), logits_to_keep=keep)
    assert kept.shape[1] == keep
    torch.testing.assert_close(kept, whole[:, -keep:], rtol=1e-5, atol=1e-5)
    assert relative_error(kept[2], adapter[2, -keep:]) <= 1e-5


MLP = {
    at: [f"{at}.{name}_proj" for name in ("gate", "up", "down")]
    for at in ("shared_expert", "shared_experts", "layers.0.mlp")
}
TIED: dict[str, Any] = {"tie_word_embeddings": True}


def test_generate_keeps_the_last_position_for_an_adapted_lm_head(tmp_path: Path) -> None:
    """generate asks for one position of the prompt; the tokens are those of whole forwards without a cache."""
    model, _ = with_peft("qwen3_moe", tmp_path, ["lm_head", "v_proj"], [])
    ids = inputs(3)
    with model.adapters.using(["it", None, "it"]):
        found = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
        for _ in range(5):
            ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, ids)
    base = model.generate(input_ids=inputs(3), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert torch.equal(base[1], found[1])
    assert not torch.equal(base, found)


# What an adapter may have beside the experts, by family: Linears and parameters (routers) as PEFT's config names them.
TARGETS: dict[str, tuple[list[str], list[str]]] = {
    "qwen2_moe": (["q_proj", "o_proj", "shared_expert_gate", *MLP["shared_expert"]], ["mlp.gate.weight"]),
    "qwen3_moe": (["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"], ["mlp.gate.weight"]),
    "mixtral": (["q_proj", "lm_head"], ["mlp.gate.weight"]),
    "olmoe": (["v_proj"], ["mlp.gate.weight"]),
    "deepseek_v2": (["q_a_proj", "kv_b_proj", *MLP["shared_experts"]], ["mlp.gate.weight"]),
    "deepseek_v3": (["q_b_proj", *MLP["shared_experts"], *MLP["layers.0.mlp"]], ["mlp.gate.weight"]),
    "glm4_moe": (["k_proj", *MLP["shared_experts"], *MLP["layers.0.mlp"]], ["mlp.gate.weight"]),
    "granitemoe": (["q_proj", "router.layer"], []),
    "gpt_oss": (["q_proj", "o_proj"], ["router.weight"]),
    "qwen3_next": (["in_proj_qkvz", "out_proj", "q_proj", *MLP["shared_expert"]], ["mlp.gate.weight"]),
    "nemotron_h": (["in_proj", "q_proj", "up_proj", "down_proj"], ["gate.weight"]),
}


@pytest.mark.parametrize("with_experts", [True, False], ids=["with experts", "without experts"])
@pytest.mark.parametrize("family", TARGETS)
def test_linears_routers_and_experts_equal_peft(family: str, with_experts: bool, tmp_path: Path) -> None:
    modules, parameters = TARGETS[family]
    up = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    experts = [f"experts.{up}", "experts.down_proj"] if with_experts else []
    model, expected = with_peft(family, tmp_path, modules, parameters + experts)
    base = logits(model, inputs(3))
    with model.adapters.using(["it", None, "it"]):
        found = logits(model, inputs(3))
    assert relative_error(found[0], expected[0]) <= 1e-5
    assert relative_error(found[2], expected[2]) <= 1e-5
    assert relative_error(expected[2], base[2]) > 1e-2
    assert torch.equal(found[1], base[1])


def test_an_adapter_of_another_family_is_refused() -> None:
    model = fanfold.load_model(sample("base_mixtral_tiny_bf16"))
    with pytest.raises(AdapterMismatchError):
        model.adapters.load("a", sample("peft_qwen3moe_target_parameters"))
    assert model.adapters.names() == []


def test_a_pool_of_other_size_takes_the_place_of_the_first() -> None:
    model = fanfold.load_model(sample("base_qwen3moe_tiny_bf16"), dtype=torch.float32)
    model.adapters.load("0", sample("peft_qwen3moe_all_linear"))  # attention too, which must not stay in slot 0
    model.adapters = AdapterPool(model, slots=12)
    for number in range(12):
        model.adapters.load(str(number), sample("peft_qwen3moe_target_parameters"))
    kept = reference("peft_qwen3moe_target_parameters")
    for name in ("0", "11"):
        with model.adapters.using([name]):
            assert relative_error(logits(model, kept["input_ids"][:1])[0], kept["logits"][0]) <= 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_lm_head_as_peft_saves_them(tied: bool, tmp_path: Path) -> None:
    """With a copy of the base's weight in the file, which has to be that of the model."""
    model, expected = with_peft("qwen3_moe", tmp_path, ["lm_head"], [], tie_word_embeddings=tied)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.lm_head.base_layer.weight"
    assert sorted(tensors) == [name, "base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"]
    base = logits(model, inputs(3))
    with model.adapters.using([None, "it", "it"]):
        found = logits(model, inputs(3))
    assert relative_error(found[1:], expected[1:]) <= 1e-5
    assert relative_error(found[1:], base[1:]) > 1e-2
    assert torch.equal(found[0], base[0])
    save_file({**tensors, name: tensors[name].bfloat16()}, file)  # trained in bf16: equal as far as that tells
    model.adapters.replace("it", tmp_path / "adapter")
    save_file({**tensors, name: tensors[name] * 1.01}, file)
    with pytest.raises(AdapterMismatchError, match=r"lm_head\.base_layer\.weight: found a base weight that is not"):
        model.adapters.replace("it", tmp_path / "adapter")
    with model.adapters.using([None, "it", "it"]):
        assert torch.equal(logits(model, inputs(3)), found)


def test_a_base_weight_without_a_pair_is_refused(tmp_path: Path) -> None:
    model, _ = with_peft("qwen3_moe", tmp_path, ["lm_head"], [])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.norm.base_layer.weight"] = torch.ones(32)
    save_file(tensors, file)
    with pytest.raises(TensorError, match=r"norm\.base_layer\.weight: found an unknown key"):
        model.adapters.load("other", tmp_path / "adapter")


def test_verify_with_adapters_of_tied_lm_heads_routers_and_dense_layers(tmp_path: Path) -> None:
    """The dense run merges each into a weight of its own, and leaves the embedding that lm_head shares alone."""
    with_peft("qwen2_moe", tmp_path, ["lm_head", "q_proj", *MLP["shared_expert"]], ["mlp.gate.weight"], **TIED)
    found = verify(tmp_path / "base", {"it": tmp_path / "adapter"})
    assert found["ok"]
    assert found["logits"]["relative_error"] <= 2e-6
