"""Whole models: what is timed is compared first; on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fanfold.throughput.run as module
from fanfold.errors import ArgumentError, FanfoldError
from fanfold.integrations.transformers import synthetic
from fanfold.integrations.transformers.by_adapter import ByAdapter
from fanfold.integrations.transformers.forward import ModelForward
from fanfold.throughput import throughput
from fanfold.throughput.models import CheckpointModels, Loaded
from fanfold.throughput.pace import Pace
from fanfold.throughput.steps import WARM_UP, Graphed
from samples import sample
from tiny_synthetic import TINY

SIZES: dict[str, Any] = {"batches": ((1, 9), (3, 7)), "new": 2, "device": "cpu", "dtype": torch.float32}
PLAIN = "base_qwen3moe_tiny_bf16"
ADAPTERS = {"a": sample("peft_qwen3moe_target_parameters"), "b": sample("peft_qwen3moe_target_parameters")}


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return list(throughput(sample(PLAIN), experts=("eager", "fanfold"), **SIZES))


def test_fanfold_is_first_and_the_others_have_its_logits(plain: list[dict[str, Any]]) -> None:
    assert [(row["experts"], row["batch"], row["prompt"]) for row in plain] == [
        ("fanfold", 1, 9),
        ("fanfold", 3, 7),
        ("eager", 1, 9),
        ("eager", 3, 7),
    ]
    assert [row["difference"] for row in plain[:2]] == [0, 0]
    assert all(0 <= row["difference"] < 1e-5 for row in plain[2:])


def test_figures(plain: list[dict[str, Any]]) -> None:
    for row in plain:
        assert (row["schema"], row["layers"], row["new"], row["adapters"], row["refused"]) == (2, None, 2, 0, None)
        assert (row["device"], row["dtype"], row["peak_bytes"]) == ("cpu", "float32", None)
        assert (row["graph_ms"], row["graph_refused"]) == (None, None)
        assert row["prefill_ms"] > 0
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["decode_ms"])
    assert [row["weights"] for row in plain] == ["bf16", "bf16", "fp32", "fp32"]


def test_steps_go_on_from_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt at once, then one token at a time, each behind the last; the adapters in turn, the base first."""
    seen: list[tuple[int, int]] = []
    lists: list[list[int] | None] = []
    prefill, decode = module.prefill, module.decode

    def watched(forward: ModelForward, token: Any, cache: Any, new: int) -> list[float]:
        seen.append((tuple(token.shape), cache.get_seq_length()))
        found = decode(forward, token, cache, new)
        seen.append((new, cache.get_seq_length()))
        return found

    def noted(forward: ModelForward, ids: Any) -> Any:
        lists.append(forward.model.adapter_rows.slots)
        return prefill(forward, ids)

    monkeypatch.setattr(module, "decode", watched)
    monkeypatch.setattr(module, "prefill", noted)
    adapters = {"a": sample("adapter-python"), "b": sample("adapter-shout")}
    sizes = SIZES | {"batches": ((4, 9),)}
    (row,) = throughput(sample("gptq-int4"), experts=("fanfold",), adapters=adapters, **sizes)
    assert seen == 2 * [((4, 1), 9), (2, 9 + WARM_UP + 2)]  # once more than is timed, behind a prompt of its own
    assert lists == [[-1, 0, 1, -1]] * module.REPEATS
    assert (row["adapters"], row["weights"]) == (2, "gptq4-g128-v1")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_runs_each_adapter_s_rows_beside_transformers_experts() -> None:
    sizes = SIZES | {"batches": ((4, 9),), "new": 1}
    rows = list(throughput(sample(PLAIN), experts=("fanfold", "grouped_mm"), adapters=ADAPTERS, **sizes))
    assert [row["refused"] for row in rows] == [None, None]
    assert rows[1]["difference"] < 1e-5
    assert rows[1]["adapters"] == 2


def test_transformers_experts_run_plain_weights_alone() -> None:
    rows = list(throughput(sample("gptq-int4"), experts=("grouped_mm",), **SIZES))
    assert {row["refused"] for row in rows} == {"transformers has no experts for gptq weights"}


def test_random_weights_are_the_same_packed_and_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.MODELS, "tiny", TINY)
    said: list[tuple[int, int, str]] = []
    rows = list(
        throughput(
            "tiny",
            formats=("gptq4-g32", "nvfp4"),
            experts=("fanfold", "batched_mm"),
            layers=2,
            progress=lambda *words: said.append(words),
            **SIZES | {"batches": ((2, 5),)},
        )
    )
    assert [(row["weights"], row["layers"]) for row in rows] == [
        ("gptq4-g32", 2),
        ("fp32", 2),
        ("nvfp4", 2),
        ("fp32", 2),
    ]
    assert all(row["difference"] < 1e-5 for row in rows)
    assert said[-1] == (3, 4, "batched_mm, 2 rows of 5 tokens")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_random_adapters_are_the_same_for_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    """And change the logits: without them other logits than fanfold's would show."""
    monkeypatch.setitem(synthetic.MODELS, "tiny", TINY)
    options: dict[str, Any] = {"formats": ("gptq4-g32",), "experts": ("fanfold", "eager"), "random_adapters": 2}
    sizes = SIZES | {"batches": ((3, 5),), "new": 1}
    rows = list(throughput("tiny", rank=4, layers=2, **options, **sizes))
    assert [(row["adapters"], row["refused"]) for row in rows] == [(2, None)] * 2
    assert 0 < rows[1]["difference"] < 1e-5
    monkeypatch.setattr(ByAdapter, "_active", lambda self, name: self._peft.disable_adapter())
    rows = list(throughput("tiny", rank=4, layers=2, **options, **sizes))
    assert rows[1]["refused"] == "other logits than fanfold's"


def test_other_logits_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    load = CheckpointModels.load

    def spoilt(self: CheckpointModels, experts: Any, adapters: Any) -> Loaded:
        loaded = load(self, experts, adapters)
        if experts == "eager":
            loaded.forward.model.lm_head.weight.data.neg_()  # type: ignore[attr-defined]
        return loaded

    monkeypatch.setattr(CheckpointModels, "load", spoilt)
    rows = list(throughput(sample(PLAIN), experts=("fanfold", "eager"), **SIZES))
    assert [row["refused"] for row in rows] == [None, None, *["other logits than fanfold's"] * 2]
    assert rows[-1]["difference"] == pytest.approx(2, rel=1e-3)
    assert rows[-1]["decode_ms"] is None


def test_no_room_for_one_batch_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ModelForward.prompt

    def full(self: ModelForward, ids: torch.Tensor, keep: int) -> Any:
        if len(ids) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 824 GiB. More words")
        return prompt(self, ids, keep)

    monkeypatch.setattr(ModelForward, "prompt", full)
    sizes = SIZES | {"batches": ((3, 7), (1, 9))}
    rows = list(throughput(sample(PLAIN), experts=("eager",), **sizes))
    assert [row["refused"] for row in rows] == ["no room: CUDA out of memory", None]
    assert rows[1]["decode_ms"] > 0


def test_replays_have_figures_where_they_have_the_eager_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace("m", None, "bf16", "fanfold", 4, 9, 2, 0)
    forward, ids = ModelForward(torch.nn.Linear(1, 1)), torch.zeros(4, 9)
    monkeypatch.setattr(module, "graphed_decode", lambda *_: Graphed([0.001, 0.002, 0.006], 0.004))
    row = module._graphed(pace, forward, ids)
    assert (row.graph_ms, row.graph_tokens_per_second, row.graph_refused) == (2, 2000, None)
    monkeypatch.setattr(module, "graphed_decode", lambda *_: Graphed([0.001], 0.5))
    row = module._graphed(pace, forward, ids)
    assert (row.graph_ms, row.graph_refused) == (None, "replays differ from eager steps by 5.0e-01")


def test_steps_that_can_t_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Graphed:
        raise RuntimeError("CUDA error: operation not permitted\nmore")

    monkeypatch.setattr(module, "graphed_decode", fails)
    ids = torch.zeros(4, 9)
    row = module._graphed(Pace("m", None, "bf16", "grouped_mm", 4, 9, 2, 0), ModelForward(torch.nn.Linear(1, 1)), ids)
    assert row.graph_refused == "not captured: CUDA error: operation not permitted"
    row = module._graphed(Pace("m", None, "bf16", "eager", 4, 9, 2, 0), None, ids)
    assert row.graph_refused == "waits for the device to say which experts have rows"
    row = module._graphed(Pace("m", None, "bf16", "grouped_mm", 4, 9, 2, 1), None, ids)
    assert row.graph_refused == "a forward for each adapter"


def test_bad_sizes_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="found batches of 1x9, 0x9 tokens, 2 new tokens"):
        next(throughput(tmp_path, **SIZES | {"batches": ((1, 9), (0, 9))}))
    with pytest.raises(ArgumentError, match="2 new tokens, 0 layers"):
        next(throughput("qwen3-30b", layers=0, **SIZES))
    with pytest.raises(FanfoldError, match=str(tmp_path)):
        next(throughput(tmp_path, **SIZES))
    with pytest.raises(ArgumentError, match="found 2 layers; expected a checkpoint as it is"):
        next(throughput(tmp_path, layers=2, **SIZES))
    with pytest.raises(ArgumentError, match="qwen3-30b"):
        next(throughput("qwen3-3b", **SIZES))
