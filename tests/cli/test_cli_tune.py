"""`fanfold tune` as a user meets it; without a GPU it says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fanfold.tune
from fanfold.bench.jobs import LayerShape
from fanfold.cli import output
from fanfold.cli.app import app

ROW: dict[str, Any] = {
    "shape": "mixtral-8x7b",
    "format": "gptq4-g128-asym-v1",
    "experts": 8,
    "top_k": 2,
    "hidden": 4096,
    "intermediate": 14336,
    "tokens": 16384,
    "kernel": "grouped_int4_sm90",
    "gpu": "NVIDIA H200",
    "path": "/tuned/NVIDIA-H200/grouped_int4_sm90.json",
    "start": "t8",
    "start_us": 28131.4,
    "us": 25001.2,
    "floor_us": 14800.2,
    "gate_up": "t128-32-w2x2-k128-s3-g8",
    "down": "t128-32-w1x2-k128-s3-g8-sum-p3",
    "chained": True,
    "trials": 64,
    "whole": False,
    "refused": None,
}
WRONG = ROW | {"refused": "wrong: norm off by 1", "us": None}


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    for console in (output.out, output.err):
        monkeypatch.setattr(console, "width", 80)
        monkeypatch.setattr(console, "no_color", True)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments], catch_exceptions=False)


def tuned(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> list[Any]:
    asked: list[Any] = []

    def instead(shapes: list[LayerShape], formats: Any, tokens: Any, **options: Any) -> Iterator[dict[str, Any]]:
        asked.extend([[shape.name for shape in shapes], [fmt.name for fmt in formats], tokens, options["trials"]])
        yield from rows

    monkeypatch.setattr(fanfold.tune, "tune", instead)
    return asked


def test_a_line_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tuned(monkeypatch, ROW, ROW | {"whole": True, "chained": False})
    result = call("--shape", "mixtral-8x7b", "--shape", "8,2,256,128", "--tokens", "1,16", "--trials", "5")
    assert result.exit_code == 0
    assert asked == [["mixtral-8x7b", "8,2,256,128"], ["gptq4-g128"], [1, 16], 5]
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 80
    shown = " ".join(result.stdout.split())
    assert shown.startswith("NVIDIA H200 medians of graph replays layer tokens before us configs")
    assert shown.count("16384 28,131.4 25,001.2") == 2
    assert shown.count("trials ran out") == 1
    assert shown.endswith("Written to /tuned/NVIDIA-H200/grouped_int4_sm90.json")


def test_json_and_a_layer_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(monkeypatch, ROW, WRONG)
    result = call("--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, [ROW, WRONG])
    tuned(monkeypatch, WRONG)
    result = call()
    assert (result.exit_code, "Written" in result.stdout) == (1, False)
    assert "no row: mixtral-8x7b gptq4-g128-asym-v1 16384 tokens: wrong: norm off by 1" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu() -> None:
    result = call("--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["what"] == "fanfold tune"
    assert call("--tokens", "x").exit_code == 2
