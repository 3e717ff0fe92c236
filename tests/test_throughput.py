"""Whole models: what is timed is compared first; on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fanfold.throughput as module
from fanfold.errors import ArgumentError, FanfoldError
from fanfold.throughput import throughput
from samples import sample

SIZES: dict[str, Any] = {"batches": (1, 3), "prompt": 9, "new": 2, "device": "cpu", "dtype": torch.float32}


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return list(throughput(sample("base_qwen3moe_tiny_bf16"), experts=("eager", "fanfold"), **SIZES))


def test_fanfold_is_first_and_the_others_have_its_logits(plain: list[dict[str, Any]]) -> None:
    assert [(row["experts"], row["batch"]) for row in plain] == [
        ("fanfold", 1),
        ("fanfold", 3),
        ("eager", 1),
        ("eager", 3),
    ]
    assert [row["difference"] for row in plain[:2]] == [0, 0]
    assert all(0 <= row["difference"] < 1e-5 for row in plain[2:])


def test_figures(plain: list[dict[str, Any]]) -> None:
    for row in plain:
        assert (row["schema"], row["prompt"], row["new"], row["adapters"], row["refused"]) == (1, 9, 2, 0, None)
        assert (row["device"], row["dtype"], row["peak_bytes"]) == ("cpu", "float32", None)
        assert row["prefill_ms"] > 0
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["decode_ms"])


def test_steps_go_on_from_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt at once, then one token at a time, each behind the last; the adapters in turn, the base first."""
    seen: list[tuple[int, int]] = []
    lists: list[list[str | None]] = []
    prefill, decode = module._prefill, module._decode

    def watched(model: Any, token: Any, cache: Any, new: int) -> list[float]:
        seen.append((tuple(token.shape), cache.get_seq_length()))
        found = decode(model, token, cache, new)
        seen.append((new, cache.get_seq_length()))
        lists.append(model.adapters_in_use)
        return found

    def noted(model: Any, ids: Any) -> Any:
        model.adapters_in_use = model.adapter_rows.slots
        return prefill(model, ids)

    monkeypatch.setattr(module, "_decode", watched)
    monkeypatch.setattr(module, "_prefill", noted)
    adapters = {"a": sample("adapter-python"), "b": sample("adapter-shout")}
    sizes = SIZES | {"batches": (4,)}
    (row,) = throughput(sample("gptq-int4"), experts=("fanfold",), adapters=adapters, **sizes)
    assert seen == [((4, 1), 9), (2, 9 + module.WARM_UP + 2)]
    assert lists == [[-1, 0, 1, -1]]
    assert row["adapters"] == 2


def test_transformers_experts_run_plain_weights_alone() -> None:
    path = sample("gptq-int4")
    rows = list(throughput(path, experts=("grouped_mm",), **SIZES))
    assert {row["refused"] for row in rows} == {"transformers has no experts for gptq weights"}
    plain = sample("base_qwen3moe_tiny_bf16")
    rows = list(throughput(plain, experts=("eager",), adapters={"a": sample("adapter-python")}, **SIZES))
    assert {row["refused"] for row in rows} == {"adapters by row are fanfold's"}


def test_other_logits_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = module._loaded

    def spoilt(*arguments: Any) -> Any:
        model = loaded(*arguments)
        if arguments[1] == "eager":
            model.lm_head.weight.data.neg_()
        return model

    monkeypatch.setattr(module, "_loaded", spoilt)
    rows = list(throughput(sample("base_qwen3moe_tiny_bf16"), experts=("fanfold", "eager"), **SIZES))
    assert [row["refused"] for row in rows] == [None, None, *["other logits than fanfold's"] * 2]
    assert rows[-1]["difference"] == pytest.approx(2, rel=1e-3)
    assert rows[-1]["decode_ms"] is None


def test_bad_sizes_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"found batches \[1, 0\], a prompt of 9, 2 new tokens"):
        next(throughput(tmp_path, **SIZES | {"batches": (1, 0)}))
    with pytest.raises(FanfoldError, match=str(tmp_path)):
        next(throughput(tmp_path, **SIZES))
