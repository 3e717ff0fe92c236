"""Which format activations take: asked for, or as the checkpoint says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.layers import activation_format
from fanfold.spec import ExpertWeights
from samples import random_experts


def stating(name: str, gate_up: str, down: str) -> ExpertWeights:
    weights = random_experts(name, 1)
    return ExpertWeights(replace(weights.gate_up, activations=gate_up), replace(weights.down, activations=down))


def resolved(asked: str, weights: ExpertWeights, path: str = "experts") -> str:
    return activation_format.resolved(asked, weights.gate_up, weights.down, path)


@pytest.mark.parametrize(
    ("name", "stated", "expected"),
    [
        ("nvfp4", "nvfp4", "nvfp4"),
        ("nvfp4", "plain", "plain"),
        ("fp8-channel", "fp8", "plain"),
        ("fp8-tensor", "fp8-static", "plain"),
        ("mxfp4", "mxfp4", "plain"),
        ("packed4-g32", "int8", "plain"),
        ("bf16", "plain", "plain"),
    ],
)
def test_auto_follows_nvfp4_alone(name: str, stated: str, expected: str) -> None:
    weights = stating(name, stated, stated)
    assert resolved("auto", weights) == expected
    assert resolved("plain", weights) == "plain"


def test_what_is_asked_for_comes_before_what_is_stated() -> None:
    assert resolved("nvfp4", stating("nvfp4-divisor", "plain", "plain")) == "nvfp4"
    assert resolved("fp8", stating("fp8-block32x32", "fp8", "fp8")) == "fp8"


def test_one_scheme_for_both_products() -> None:
    weights = stating("nvfp4", "nvfp4", "plain")
    with pytest.raises(UnsupportedError, match="found nvfp4 for gate and up, plain for down") as caught:
        resolved("auto", weights, "model.layers.3.mlp.experts")
    assert caught.value.what == "activations of model.layers.3.mlp.experts"
    assert resolved("plain", weights) == "plain"
    assert resolved("auto", stating("nvfp4", "fp8", "plain")) == "plain"


@pytest.mark.parametrize(("asked", "name"), [("nvfp4", "mxfp4"), ("fp8", "nvfp4"), ("fp8", "gptq4-g32")])
def test_weights_of_another_format_are_refused(asked: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"found {name}, {name} weights; expected {asked} weights"):
        resolved(asked, random_experts(name, 1))


@pytest.mark.parametrize("asked", ["w4a4", "", "NVFP4"])
def test_unknown_names(asked: str) -> None:
    with pytest.raises(ArgumentError, match="expected one of auto, plain, nvfp4, fp8"):
        resolved(asked, random_experts("bf16", 1))
