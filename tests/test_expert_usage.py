"""expert_usage: counts that are those of the model's own routers, and figures by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fanfold
from fanfold import expert_usage as room
from fanfold.bench.recorded import read
from fanfold.errors import ArgumentError, CorruptFileError, MissingFileError
from fanfold.expert_usage import expert_usage, kept_choices, rows_of_experts, statistics
from fanfold.integrations.transformers.tokenizer import load_tokenizer, token_ids
from samples import EXAMPLE, sample

MODEL = sample("gptq-int4")
TEXT = "The king went to the sea, and the people said that it was good.\n"
ADAPTERS = {"shout": EXAMPLE / "adapter-shout"}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def report(file: Path) -> dict[str, Any]:
    """In windows of 7 tokens, the last of them shorter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "WINDOW", 7)
        return expert_usage(MODEL, file, ADAPTERS, record=file.with_name("routing.safetensors"))


def routed(ids: Tensor, name: str | None) -> dict[int, list[set[int]]]:
    """The experts of each token by layer, as the routers' own logits say, in the same windows."""
    model = fanfold.load_model(MODEL)
    model.adapters.load("shout", ADAPTERS["shout"])
    found: dict[int, list[set[int]]] = {layer: [] for layer in range(4)}
    for window in ids.split(7):
        with torch.inference_mode(), model.adapters.using([name]):
            logits = model(input_ids=window[None], output_router_logits=True).router_logits
        for layer, scores in enumerate(logits):
            found[layer] += [set(row) for row in scores.topk(4).indices.tolist()]
    return found


@pytest.mark.parametrize("name", [None, "shout"])
def test_counts_are_those_of_the_routers(report: dict[str, Any], name: str | None) -> None:
    ids = torch.tensor(token_ids(load_tokenizer(MODEL), TEXT))
    assert (report["tokens"], report["window"]) == (len(ids), 7)
    assert len(ids) % 7
    run = next(run for run in report["runs"] if run["adapter"] == name)
    base, wanted = routed(ids, None), routed(ids, name)
    for entry in run["layers"]:
        tokens = wanted[entry["layer"]]
        counts = [sum(expert in token for token in tokens) for expert in range(16)]
        assert entry["counts"] == counts
        assert entry["top_k"] == 4
        if name is not None:
            kept = sum(len(was & token) for was, token in zip(base[entry["layer"]], tokens, strict=True))
            assert entry["changed"] == pytest.approx(1 - kept / (4 * len(ids)))
    changed = [entry["changed"] for entry in run["layers"]]
    assert changed == [None] * 4 if name is None else changed[0] == 0 < min(changed[1:])


def test_the_record_holds_the_base_s_choices_in_order(report: dict[str, Any], file: Path) -> None:
    recorded = read(file.with_name("routing.safetensors"))
    ids = torch.tensor(token_ids(load_tokenizer(MODEL), TEXT))
    assert {layer: [set(row) for row in of.tolist()] for layer, of in recorded.layers.items()} == routed(ids, None)


def test_what_moved(report: dict[str, Any]) -> None:
    base, shout = (run["layers"] for run in report["runs"])
    for was, entry in zip(base, shout, strict=True):
        surplus = sum(max(0, b - a) for a, b in zip(was["counts"], entry["counts"], strict=True))
        assert entry["moved"] == pytest.approx(surplus / (4 * report["tokens"]))
        assert entry["moved"] <= entry["changed"] + 1e-12


def test_the_report_is_json(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report)) == report
    assert [run["adapter"] for run in report["runs"]] == [None, "shout"]


def test_statistics_by_hand() -> None:
    found = statistics(torch.tensor([4, 0, 2, 2]))
    assert found["counts"] == [4, 0, 2, 2]
    assert (found["max_over_mean"], found["fullest"], found["unused"]) == (2.0, 0, 1)
    assert found["entropy"] == pytest.approx(1.5)
    assert found["effective"] == pytest.approx(2**1.5)
    even = statistics(torch.tensor([3] * 8))
    assert (even["max_over_mean"], even["entropy"], even["unused"]) == (1.0, pytest.approx(3.0), 0)


def test_choices_by_hand() -> None:
    """Two runs of three tokens: the same, in another order, one of two."""
    chosen = torch.tensor([[[0, 1], [2, 3], [1, 2]], [[0, 1], [3, 2], [1, 0]]])
    assert kept_choices(chosen).tolist() == [6, 5]
    assert rows_of_experts(chosen, 5).tolist() == [[1, 2, 2, 1, 0], [2, 2, 1, 1, 0]]


def test_no_hook_stays(report: dict[str, Any]) -> None:
    model = fanfold.load_model(MODEL)
    seen: dict[int, Tensor] = {}
    with room._watching(model, seen, 1):
        model(torch.tensor([[1, 2, 3]]))
    assert {layer: tuple(ids.shape) for layer, ids in seen.items()} == {layer: (1, 3, 4) for layer in range(4)}
    seen.clear()
    model(torch.tensor([[1, 2, 3]]))
    assert not seen


def test_texts_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="No such file"):
        expert_usage(MODEL, tmp_path / "nothing.txt")
    file = tmp_path / "text"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorruptFileError, match="no UTF-8"):
        expert_usage(MODEL, file)
    file.write_text(" \n")
    with pytest.raises(ArgumentError, match="an empty file"):
        expert_usage(MODEL, file)
