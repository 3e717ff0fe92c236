"""torch.compile(model): the same logits, compiled once without a list of adapters and once with any."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import PEFT_WARNS, inputs, with_peft

from samples import logits, relative_error

pytestmark = [
    *PEFT_WARNS,
    # Inductor imports parts of torch that torch itself has deprecated.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU"),
]
TARGETS = ["mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj"]


def test_compiled_by_inductor(tmp_path: Path) -> None:
    """Attention, router and experts adapted; lists that change, and none, between calls of one compiled model."""
    model, theirs = with_peft("qwen3_moe", tmp_path, ["q_proj", "o_proj"], TARGETS, num_hidden_layers=1)
    base = logits(model, inputs(3))
    torch._dynamo.reset()
    counters: dict[str, Any] = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model)
    assert relative_error(logits(compiled, inputs(3)), base) <= 1e-5
    assert counters["stats"]["unique_graphs"] > 0
    graphs = 0
    for names in (["it", None, "it"], [None, None, "it"], ["it", "it", "it"]):
        with model.adapters.using(names):
            found = logits(compiled, inputs(3))
        for row, name in enumerate(names):
            assert relative_error(found[row], base[row] if name is None else theirs[row]) <= 1e-5
        graphs = graphs or counters["stats"]["unique_graphs"]
    assert relative_error(theirs, base) > 1e-2
    assert relative_error(logits(compiled, inputs(3)), base) <= 1e-5
    assert counters["stats"]["unique_graphs"] == graphs


def test_adapters_and_lists_are_one_graph(tmp_path: Path) -> None:
    """Adapters of experts, router and attention: nothing breaks the graph, and lists of one length share it."""
    model, theirs = with_peft("qwen3_moe", tmp_path, ["q_proj", "o_proj"], TARGETS, num_hidden_layers=1)
    torch._dynamo.reset()
    counters: dict[str, Any] = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    base = logits(model, inputs(3))
    assert relative_error(logits(compiled, inputs(3), use_cache=False), base) <= 1e-6
    for names in (["it", None, "it"], [None, None, "it"], ["it", "it", "it"]):
        with model.adapters.using(names):
            found = logits(compiled, inputs(3), use_cache=False)
        for row, name in enumerate(names):
            assert relative_error(found[row], base[row] if name is None else theirs[row]) <= 1e-5
    assert counters["stats"]["unique_graphs"] == 2
