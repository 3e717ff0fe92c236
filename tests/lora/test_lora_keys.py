"""The names of tensors: which pair each belongs to, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lora_files import EXPERTS, QUERY
from torch import Tensor

from fanfold.errors import FanfoldError, TensorError, UnsupportedError
from fanfold.lora.keys import EXPERT, group_keys

FILE = Path("adapter_model.safetensors")
ONE = torch.ones(1, 1)


def group(*keys: str) -> dict[str, dict[int, tuple[float, float]]]:
    """The groups of a file whose tensors hold 0, 1, 2, ... in the order of `keys`."""
    tensors: dict[str, Tensor] = {f"base_model.model.{key}": ONE * number for number, key in enumerate(keys)}
    groups = group_keys(FILE, tensors)
    return {
        module: {depth: (pair.a.item(), pair.b.item()) for depth, pair in by_depth.items()}
        for module, by_depth in groups.items()
    }


def test_pairs_of_a_linear() -> None:
    assert group(f"{QUERY}.lora_B.weight", f"{QUERY}.lora_A.weight") == {QUERY: {0: (1, 0)}}
    assert group("lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight") == {"lm_head": {0: (0, 1)}}


def test_depth_of_nested_wrappers() -> None:
    found = group(
        f"{EXPERTS}.lora_A.weight",
        f"{EXPERTS}.lora_B.weight",
        f"{EXPERTS}.base_layer.lora_A.weight",
        f"{EXPERTS}.base_layer.lora_B.weight",
    )
    assert found == {EXPERTS: {0: (0, 1), 1: (2, 3)}}


REFUSED: list[tuple[str, type[FanfoldError], str]] = [
    (f"{QUERY}.lora_magnitude_vector", UnsupportedError, "DoRA"),
    (f"{QUERY}.lora_magnitude_vector.default.weight", UnsupportedError, "DoRA"),
    (f"{QUERY}.lora_B.bias", UnsupportedError, "lora_bias"),
    (f"{QUERY}.lora_B.default.bias", UnsupportedError, "lora_bias"),
    (f"{QUERY}.lora_A.bias", UnsupportedError, "a bias behind lora_A"),
    ("model.embed_tokens.lora_embedding_A", UnsupportedError, "LoRA on an embedding"),
    ("lm_head.modules_to_save.weight", UnsupportedError, "a whole module"),
    ("lm_head.weight", TensorError, "an unknown key"),
    (f"{QUERY}.lora_C.weight", TensorError, "an unknown key"),
    (f"{QUERY}.lora_A.other.weight", TensorError, "an unknown key"),
    (f"{QUERY}.base_layer.lora_A.weight", TensorError, "an unknown key"),
    (f"{QUERY}.lora_A.weight.absmax", TensorError, "an unknown key"),
]


@pytest.mark.parametrize(("key", "error", "text"), REFUSED, ids=[key for key, _, _ in REFUSED])
def test_other_keys_are_refused_by_name(key: str, error: type[FanfoldError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        group(f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight", key)
    assert type(caught.value) is error
    assert caught.value.what == f"{FILE}: base_model.model.{key}"


def test_the_prefix_is_needed() -> None:
    with pytest.raises(TensorError, match="an unknown key"):
        group_keys(FILE, {f"{QUERY}.lora_A.weight": ONE, f"{QUERY}.lora_B.weight": ONE})


@pytest.mark.parametrize(("there", "missing"), [("A", "B"), ("B", "A")])
def test_a_pair_without_its_partner(there: str, missing: str) -> None:
    with pytest.raises(TensorError, match=f"lora_{there} without lora_{missing}") as caught:
        group("lm_head.lora_A.weight", "lm_head.lora_B.weight", f"{QUERY}.lora_{there}.weight")
    assert caught.value.what == f"{FILE}: {QUERY}"


def test_partners_are_of_one_wrapper() -> None:
    with pytest.raises(TensorError, match="lora_A without lora_B"):
        group(f"{EXPERTS}.lora_A.weight", f"{EXPERTS}.base_layer.lora_B.weight")


def test_two_spellings_of_one_tensor() -> None:
    with pytest.raises(TensorError, match="two spellings"):
        group(f"{QUERY}.lora_A.weight", f"{QUERY}.lora_A.default.weight", f"{QUERY}.lora_B.weight")


def test_an_empty_file() -> None:
    with pytest.raises(TensorError, match="no tensors"):
        group()


def test_expert_modules() -> None:
    match = EXPERT.fullmatch(f"{EXPERTS}.12.w3")
    assert match is not None
    assert match.groupdict() == {"container": EXPERTS, "number": "12", "projection": "w3"}
    assert EXPERT.fullmatch("model.layers.0.mlp.shared_experts.gate_proj") is None
    assert EXPERT.fullmatch("model.layers.0.mlp.shared_experts.0.gate_proj") is None
    assert EXPERT.fullmatch("model.layers.0.mlp.experts.0.o_proj") is None
