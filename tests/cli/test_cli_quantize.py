"""`fanfold quantize` as a user meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fanfold.cli import output
from fanfold.cli.app import app
from samples import sample

BASE = str(sample("base_qwen3moe_tiny_bf16"))


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for console in (output.out, output.err):
        monkeypatch.setattr(console, "width", 80)
        monkeypatch.setattr(console, "no_color", True)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["quantize", *arguments], catch_exceptions=False)


def test_help_names_it() -> None:
    assert "quantize" in CliRunner().invoke(app, ["--help"]).stdout


def test_a_table_of_errors_by_layer(tmp_path: Path) -> None:
    result = call(BASE, "--format", "nvfp4", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0] == ["layer", "gate", "worst", "up", "worst", "down", "worst"]
    assert [line[0] for line in lines[2:4]] == ["0", "1"]
    for line in lines[2:4]:
        for error, expert, worst in (line[1:4], line[4:7], line[7:10]):
            assert 9 < float(error.removesuffix("%")) <= float(worst.removesuffix("%")) < 10
            assert 0 <= int(expert.removesuffix(":")) < 8
    assert ["format", "nvfp4-divisor"] in lines
    assert any(line[0] == "experts" and line[-3:] == ["(28%", "of", "before)"] for line in lines)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert max(map(len, result.stdout.splitlines()[:6])) <= 80


def test_json(tmp_path: Path) -> None:
    result = call(BASE, "--format", "int4", "--group-size", "32", "--output", str(tmp_path / "out"), "--json")
    report = json.loads(result.stdout)
    assert report["format"] == "packed4-g32"
    assert [layer["layer"] for layer in report["layers"]] == [0, 1]
    assert set(report["layers"][0]["down"]) == {"relative_error", "worst_expert", "worst_relative_error"}
    assert result.stderr == ""


def test_wrong_use(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert call(BASE, "--format", "nvfp4").exit_code == 2
    result = call(BASE, "--format", "int4", "-o", out, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["found"] == "K = 64"
    assert "a multiple of 128" in result.stderr
    assert call(BASE, "--format", "fp8", "--group-size", "32", "-o", out).exit_code == 2
    assert call(BASE, "--format", "fp4", "-o", out).exit_code == 2
    assert not (tmp_path / "out").exists()
