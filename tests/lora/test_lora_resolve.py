"""Which site a module path of an adapter means."""

from __future__ import annotations

import pytest

from fanfold.errors import AdapterMismatchError
from fanfold.lora.resolve import SiteFinder

QWEN = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts", "model.layers.1.mlp.gate", "lm_head"]
LANGUAGE = ["model.language_model.layers.0.mlp.experts", "model.language_model.layers.1.mlp.experts"]
VISION = [*LANGUAGE, "model.visual.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"]

FOUND = [
    (QWEN, "model.layers.1.mlp.experts", "model.layers.1.mlp.experts"),
    (QWEN, "lm_head", "lm_head"),
    # spellings
    (QWEN, "model.layers.1.block_sparse_moe.experts", "model.layers.1.mlp.experts"),
    (QWEN, "model.layers.1.block_sparse_moe.gate", "model.layers.1.mlp.gate"),
    (QWEN, "model.layers.1.mlp.router", "model.layers.1.mlp.gate"),
    (["model.layers.0.mlp.router"], "model.layers.0.mlp.gate", "model.layers.0.mlp.router"),
    (["layers.0.block_sparse_moe.experts"], "layers.0.mlp.experts", "layers.0.block_sparse_moe.experts"),
    # leading names
    (LANGUAGE, "model.layers.1.mlp.experts", LANGUAGE[1]),
    (LANGUAGE, "language_model.model.layers.1.mlp.experts", LANGUAGE[1]),
    (LANGUAGE, "layers.1.block_sparse_moe.experts", LANGUAGE[1]),
    (QWEN, "model.language_model.layers.0.mlp.experts", QWEN[0]),
    (VISION, "language_model.layers.0.self_attn.q_proj", VISION[3]),
    (VISION, "visual.layers.0.self_attn.q_proj", VISION[2]),
    # the exact one wins
    (["a.0.mlp.gate", "a.0.mlp.router"], "a.0.mlp.gate", "a.0.mlp.gate"),
    (["a.0.mlp.gate", "a.0.mlp.router"], "a.0.mlp.router", "a.0.mlp.router"),
    # nothing
    (QWEN, "model.layers.2.mlp.experts", None),
    (QWEN, "model.layers.11.mlp.experts", None),
    (QWEN, "model.blocks.1.mlp.experts", None),
    (QWEN, "model.layers.0.mlp.gate", None),
    (QWEN, "model.layers.1.self_attn.q_proj", None),
    (QWEN, "model.lm_head", None),
    (["model.experts"], "model.mlp.experts", None),
    ([], "model.layers.0.mlp.experts", None),
]


@pytest.mark.parametrize(("sites", "path", "expected"), FOUND)
def test_find(sites: list[str], path: str, expected: str | None) -> None:
    finder = SiteFinder(sites)
    assert finder.find(path) == expected
    assert finder.find(path) == expected  # again, from memory


@pytest.mark.parametrize(
    ("sites", "path"),
    [
        (VISION, "model.layers.0.self_attn.q_proj"),
        (["a.0.mlp.gate", "a.0.mlp.router"], "a.0.block_sparse_moe.gate"),
        (["x.layers.0.mlp.experts", "y.layers.0.mlp.experts"], "z.layers.0.mlp.experts"),
    ],
)
def test_two_that_fit_are_refused(sites: list[str], path: str) -> None:
    with pytest.raises(AdapterMismatchError, match="expected one module of the model") as caught:
        SiteFinder(sites).find(path)
    assert caught.value.what == path
    assert caught.value.found.count(".0.") == 2


def test_nearest() -> None:
    assert SiteFinder(QWEN).nearest("model.layers.7.mlp.experts")[:2] == [QWEN[1], QWEN[0]]
    assert SiteFinder([]).nearest("model.layers.7.mlp.experts") == []
