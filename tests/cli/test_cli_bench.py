"""`fanfold bench` as a user meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fanfold.bench import run, timing
from fanfold.bench.jobs import LAYERS
from fanfold.bench.recorded import write
from fanfold.cli import output
from fanfold.cli.app import app
from fanfold.cli.bench_model import print_paces
from fanfold.integrations.transformers.synthetic import MODELS
from fanfold.layers.experts import Experts
from fanfold.throughput.pace import EXPERTS
from samples import sample
from tiny_synthetic import TINY as TINY_MODEL

TINY = ["--shape", "8,2,64,32", "--format", "gptq4-g32", "--device", "cpu"]


class ZeroExperts(Experts):
    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(hidden)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPLAYS", 5)
    for console in (output.out, output.err):
        monkeypatch.setattr(console, "width", 80)
        monkeypatch.setattr(console, "no_color", True)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], catch_exceptions=False)


def test_table() -> None:
    result = call(*TINY, "--format", "nvfp4", "--tokens", "1,5", "--routing", "power")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert " ".join(lines[0]).endswith("CPUs bfloat16, power routing, medians of calls")
    assert lines[1] == ["8,2,64,32"]
    assert lines[2] == ["format", "tokens", "us", "20-80", "TFLOP/s", "GB/s", "error"]
    assert [line[:2] for line in lines[4:8]] == [
        ["gptq4-g32", "1"],
        ["reference", "5"],
        ["nvfp4", "1"],
        ["reference", "5"],
    ]


def test_adapters() -> None:
    options = ["--tokens", "5", "--adapters", "3", "--rank", "4", "--popularity", "distinct"]
    result = call(*TINY, *options)
    assert result.exit_code == 0
    assert "uniform routing, 3 adapters of rank 4 (distinct), medians of calls" in result.stdout
    (row,) = json.loads(call(*TINY, *options, "--json").stdout)
    assert (row["adapters"], row["rank"], row["popularity"]) == (3, 4, "distinct")
    assert call(*TINY, "--adapters", "1", "--rank", "513").exit_code == 2


def test_recorded_routing(tmp_path: Path) -> None:
    file = tmp_path / "routing.safetensors"
    write(file, {0: torch.tensor([[0, 1], [1, 0], [0, 1]]), 1: torch.tensor([[0, 1]])})
    (row,) = json.loads(call(*TINY, "--tokens", "5", "--routing", f"recorded:{file}", "--json").stdout)
    assert (row["routing"], row["experts_met"], row["load"]) == (f"recorded:{file}", 2, 4)
    result = call(*TINY, "--shape", "8,1,64,32", "--tokens", "5", "--routing", f"recorded:{file}", "--json")
    assert (result.exit_code, json.loads(result.stdout)["what"]) == (2, f"recorded:{file}")


def test_peers() -> None:
    result = call(*TINY, "--tokens", "5", "--peers", "torch,transformers")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    peers = ["torch", "eager", "grouped", "batched"]
    assert lines[2] == ["format", "tokens", "us", *peers]
    ratios = lines[4][3:]
    assert len(ratios) == 4
    assert all(ratio.endswith("x") for ratio in ratios)  # the reference is slow: a hundredth of it shows as 0
    result = call(*TINY, "--tokens", "5", "--peers", "torch", "--adapters", "1")
    assert "torch: no figure, peers run no adapters by token" in result.stdout
    assert " - " in f"{result.stdout.splitlines()[5]} "


def test_json_and_lines_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    results = [call(*TINY, "--tokens", tokens, "--json", "--out", str(file)) for tokens in ("1,2", "3")]
    rows = [row for result in results for row in json.loads(result.stdout)]
    assert [row["tokens"] for row in rows] == [1, 2, 3]
    assert all(row["median_us"] > 0 for row in rows)
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_wrong_layer_has_no_figure_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: list[str]
) -> None:
    monkeypatch.setattr(run, "Experts", ZeroExperts)
    file = tmp_path / "rows.jsonl"
    result = call(*TINY, "--tokens", "4", "--out", str(file), *form)
    assert result.exit_code == 1
    row = json.loads(file.read_text())
    assert row["median_us"] is None
    assert row["error"] == 1
    assert row["refused"].startswith("wrong: relative error 1.0e+00, limit ")
    if form:
        assert json.loads(result.stdout) == [row]
    else:
        assert "refused" in result.stdout
        assert "no figure: 8,2,64,32 gptq4-g32 4 tokens: wrong: relative error" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--tokens", "1,x"], "--tokens"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", ""], "--tokens"),
        (["--shape", "qwen"], "shape"),
        (["--routing", "zipf"], "--routing"),
        (["--routing", "recorded:nowhere.safetensors"], "nowhere.safetensors"),
        (["--peers", "torch,cutlass"], "--peers"),
        (["--format", "gptq5-g32"], "gptq bits"),
        (["--implementation", "fast", "--tokens", "1"], "implementation"),
    ],
)
def test_wrong_use(arguments: list[str], what: str) -> None:
    result = call(*TINY, *arguments, "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["what"] == what


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu() -> None:
    result = call("--device", "cuda", "--json")
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert report["error"] == "UnavailableError"
    assert "--device cpu" in report["next_step"]


def test_a_line_on_a_gpu_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    from fanfold.cli.bench_table import print_rows

    row = {
        "gpu": "NVIDIA H200",
        "dtype": "bfloat16",
        "adapters": 0,
        "routing": "uniform",
        "timing": "graph replays",
        "device": "cuda",
        "shape": "mixtral-8x7b",
        "format": "gptq4-g128-actorder",
        "tokens": 16384,
        "median_us": 28131.4,
        "p20_us": 28000.0,
        "p80_us": 29000.0,
        "floor_us": 14800.2,
        "over_floor": 1.9007,
        "teraflops": 413.2,
        "gigabytes_per_second": 4012.6,
        "error": 1.7e-3,
        "implementation": "grouped_int4_sm90",
        "refused": None,
        "copies": 3,
        "weight_bytes": 728e6,
        "experts_met": 8.0,
        "load": 1.0312,
    }
    print_rows([row])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    shown = " ".join(lines)
    for figure in ("16384", "28,131", "4%", "14,800", "1.90", "413", "4,013", "1.7e-03"):
        assert f" {figure} " in shown
    assert lines[-2] == "Tokens: experts met, most rows of one over the mean. 16384: 8, 1.03"
    assert lines[-1] == "At least 1.5 GB of other weights between two reads of one."
    names = ["torch", *(f"transformers {name}" for name in ("eager", "grouped_mm", "batched_mm")), "vllm", "deepgemm"]
    peers = [{"name": name, "ratio": 11.255, "refused": None} for name in names]
    print_rows([row | {"peers": peers}])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[5].split()).endswith("28,131 14,800 1.90 " + " ".join(["11.26x"] * 6))


def test_help_names_every_layer() -> None:
    text = " ".join(call("--help").stdout.replace("│", " ").split())
    for name in LAYERS:
        assert name in text


MODEL = ["--model", str(sample("gptq-int4")), "--batch", "1,2x3", "--prompt", "5", "--new", "1", "--device", "cpu"]


def test_a_model(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    result = call(*MODEL, "--adapter", f"a={sample('adapter-python')}", "--out", str(file))
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert " ".join(lines[0]).endswith("bfloat16, 1 decode steps, adapters in turn: 1")
    assert lines[2] == ["experts", "weights", "batch", "prefill", "ms", "step", "ms", "tokens/s", "memory"]
    assert [line[:3] for line in lines[4:6]] == [["fanfold", "gptq4-g128-v1", size] for size in ("1x5", "2x3")]
    assert result.stdout.splitlines()[-1] == "batched_mm: no figure, transformers has no experts for gptq weights"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["experts"], row["batch"]) for row in rows[:3]] == [("fanfold", 1), ("fanfold", 2), ("eager", 1)]


def test_a_model_in_json() -> None:
    rows = json.loads(call(*MODEL, "--json").stdout)
    assert len(rows) == 8
    assert rows[1]["tokens_per_second"] > 0
    assert call("--model", "nowhere").exit_code == 2
    for batch in ("0", "1x0", "x2", "1x", ""):
        result = call(*MODEL[:2], "--batch", batch, "--json")
        assert (result.exit_code, json.loads(result.stdout)["found"]) == (2, repr(batch))


def test_a_model_of_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny", TINY_MODEL)
    options = ["--layers", "1", "--format", "gptq4-g32", "--batch", "2x3", "--new", "1", "--device", "cpu"]
    result = call("--model", "tiny", *options)
    assert result.exit_code == 0
    assert "tiny, 1 layers of random weights" in result.stdout
    lines = [line.split()[:3] for line in result.stdout.splitlines() if "2x3" in line]
    assert lines == [["fanfold", "gptq4-g32", "2x3"], *([name, "bf16", "2x3"] for name in EXPERTS[1:])]


def test_steps_of_graphs_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "gpu": "NVIDIA H200",
        "dtype": "bfloat16",
        "new": 16,
        "adapters": 0,
        "model": "qwen3-30b",
        "layers": 48,
        "experts": "grouped_mm",
        "weights": "gptq4-g128",
        "batch": 8,
        "prompt": 2048,
        "prefill_ms": 1088.81,
        "decode_ms": 112.44,
        "tokens_per_second": 71.1,
        "graph_ms": 11.2,
        "graph_tokens_per_second": 714.3,
        "graph_refused": None,
        "peak_bytes": 71 * 10**9,
        "refused": None,
    }
    refused = row | {"experts": "eager", "graph_ms": None, "graph_tokens_per_second": None, "graph_refused": "waits"}
    print_paces([row, refused])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert "8x2048 1,089 112.4 11.2 714.3 71.0 GB" in " ".join(lines[5].split())
    assert "8x2048 1,089 112.4 71.1 71.0 GB" in " ".join(lines[6].split())
    assert lines[-1] == "eager: no graph, waits"
