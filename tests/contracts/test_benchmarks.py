"""The stored results are what their README says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fanfold.bench.cell import SCHEMA, Cell, Settings
from fanfold.bench.jobs import LAYERS
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.spec import WeightFormat
from fanfold.throughput.pace import Pace

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (RESULTS / "README.md").read_text()
FILES = sorted(RESULTS.glob("int4_run*.jsonl"))
COPIED = "cfbb1c89b38f47d80dce8ef905a1a4b342354cd6-dirty"
OF_COPIED = {"bench_run2", "bench_adapters_run3", "nvfp4_packing_run1"}
"""Files whose code was copied over another checkout, as PAGE says: their rows name that."""
BENCH = sorted(RESULTS.glob("bench_*.jsonl"))
GROUPED = sorted(RESULTS.glob("grouped_*.jsonl"))
LORA = sorted(RESULTS.glob("lora_run*.jsonl"))  # test_lora_results.py
POOL = sorted(RESULTS.glob("adapter_pool_run*.jsonl"))
MODELS = sorted(RESULTS.glob("model_run*.jsonl"))
PACKING = sorted(RESULTS.glob("nvfp4_packing_run*.jsonl"))
PRODUCT = {"shape", "T", "what", "us", "cfg"}
LAYER = {"shape", "T", "what", "us", "us_nopdl", "floor", "plan", "combine", "gate_up", "down", "c1", "c2"}
# Values of a config by run, as the README has them.
VALUES = {1: {5}, 2: {8}, 3: {10}, 5: {11}, 6: {10, 4}, 7: {10}, 9: {10, 6}, 11: {10, 5}, 12: {9}, 13: {9}}
# Runs from 12 on wrote other fields.
PRODUCT_12 = {*PRODUCT, "format", "chained", "same", "nan"}
LAYER_12 = {"shape", "T", "what", "us", "format", "chained", "plan", "combine", "gate_up", "down", "c1", "c2"}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_have_the_fields_of_their_page(path: Path) -> None:
    number = int(path.stem.removeprefix("int4_run"))
    assert f"| `{path.name}` |" in PAGE
    lengths: set[int] = set()
    for row in rows_of(path):
        if row["what"] == "layer":
            assert set(row) == (LAYER_12 if number >= 12 else LAYER | ({"group", "zeros"} if number == 11 else set()))
            configs = (row["c1"], row["c2"])
        else:
            assert set(row) == (PRODUCT_12 if number >= 12 else PRODUCT)
            assert row.get("same") is not False
            assert row.get("nan") in (None, False)
            configs = (row["cfg"],)
        lengths |= {len(config) for config in configs if isinstance(config, list)}
        assert isinstance(row["us"], float)
    assert lengths == VALUES[number]


def test_every_field_and_file_is_told() -> None:
    assert {int(path.stem.removeprefix("int4_run")) for path in FILES} == set(VALUES)
    for name in PRODUCT_12 | LAYER | {"group", "zeros"}:
        assert f"`{name}`" in PAGE
    assert sum(path.stat().st_size for path in FILES) < 1_000_000


def test_the_tuned_table_is_made_of_these_rows() -> None:
    found = {(row["shape"], row["T"], number): row for number in (9, 11) for row in layer_rows(number)}
    for number in (12, 13):
        layers = sorted(layer_rows(number), key=lambda row: row["us"], reverse=True)  # the fastest of a cell stays
        found |= {(row["shape"], row["T"], (number, row["format"])): row for row in layers}
    shapes = {768: "qwen3-30b", 14336: "mixtral-8x7b", 2048: "deepseek-v3/8", 2880: "gpt-oss-120b", 512: "qwen3-next"}
    for tuned in read_table():
        name = "gptq4-g128" if tuned.format == "int4" else tuned.format
        with_formats = tuned.run >= 12
        row = found[(shapes[tuned.intermediate], tuned.tokens, (tuned.run, name) if with_formats else tuned.run)]
        if with_formats:
            assert (tuned.us["layer"], tuned.chained) == (round(row["us"], 1), row["chained"])
        else:
            assert tuned.us["layer"] == round(min(row["us"], row["us_nopdl"]), 1)
            assert tuned.chained == (row["us"] <= row["us_nopdl"])
        for config, stored in ((tuned.gate_up, row["c1"]), (tuned.down, row["c2"])):
            assert list(vars(config).values()) == stored[:9]


def layer_rows(number: int) -> list[dict[str, Any]]:
    return [row for row in rows_of(RESULTS / f"int4_run{number}.jsonl") if row["what"] == "layer"]


def fields_of(schema: int, today: set[str]) -> set[str]:
    """As benchmarks/README.md tells the schemas."""
    assert SCHEMA == 3
    second = today - {"peers"}
    first = (second - {"schema", "load", "p20_us", "p80_us"}) | {"p10_us", "p90_us"}
    return {1: first, 2: second, 3: today}[schema]


def test_rows_of_fanfold_bench() -> None:
    """Those of a GPU, verified, of a commit without edits, with the fields that bench writes today."""
    cell = Cell(LAYERS["qwen3-30b"], WeightFormat.parse("bf16"), 1, Settings(torch.device("cpu")))
    for path in BENCH:
        assert f"`{path.name}`" in PAGE
        for row in rows_of(path):
            assert set(row) == fields_of(row.get("schema", 1), set(cell.row()))
            assert row["refused"] is None
            assert row["gpu"] is not None
            assert 0 < row["error"] < 2 * row["plain_error"]
            assert row["commit"] == COPIED if path.stem in OF_COPIED else len(row["commit"]) == 40


def test_the_table_of_every_format() -> None:
    """docs/measured.md shows the medians of bench_run1."""
    text = (ROOT / "docs" / "measured.md").read_text().split("## Every kind of format")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    table = {name: cells for name, *cells in lines if name != "tokens"}
    found: dict[str, list[str]] = {}
    for row in rows_of(RESULTS / "bench_run1.jsonl"):
        us = row["median_us"]
        found.setdefault(row["format"], []).append(f"{us:.1f}" if us < 100 else f"{us:.0f}")
    assert table == found


def test_rows_of_the_portable_product() -> None:
    """Every field is told, and every config that was timed was right."""
    for path in GROUPED:
        assert f"| `{path.name}` |" in PAGE
        for row in rows_of(path):
            assert row.get("err", 0.0) < 6e-3
            told = {"shape", "T", "us", "floor", "err", "gate_up", "down", "format"}
            assert all(f"`{name}`" in PAGE for name in set(row) - told)


def test_rows_of_the_pool() -> None:
    """Of a GPU, and a commit without edits; memory is that of the pairs, within the pool's own limit of 6 %."""
    for path in POOL:
        assert f"| `{path.name}` |" in PAGE
        for row in rows_of(path):
            assert row["gpu"] is not None
            assert len(row["commit"]) == 40
            assert 1 <= row["over_padded"] <= 1.06
            assert row["over_padded"] == sum(row["memory_bytes"]) / (row["adapters"] * row["padded_bytes"])
            assert len(row["memory_bytes"]) == len(row["load_s"]) == row["adapters"]


def test_rows_of_whole_models() -> None:
    """Of a GPU, and a commit without edits; logits agreed, and those of replays with those of eager steps."""
    today = set(Pace("", None, "", "fanfold", 1, 1, 1, 0).row(torch.device("cpu"), torch.bfloat16))
    for path in MODELS:
        assert f"| `{path.name}` |" in PAGE
        for row in rows_of(path):
            assert set(row) == today
            assert len(row["commit"]) == 40
            if row["refused"] is None:
                assert row["gpu"] is not None
                assert 0 <= row["difference"] < 0.1
                assert (row["graph_ms"] is None) == (row["graph_refused"] is not None)
                assert row["graph_ms"] is None or row["graph_difference"] < 0.01


def test_the_table_of_whole_models() -> None:
    """docs/measured.md shows the graphs' steps and the long prefill of model_run1."""
    text = (ROOT / "docs" / "measured.md").read_text().split("## Whole models on an H200")[1].split("\n## ")[0]
    lines = [line.replace("*", "").strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    stored = reversed(rows_of(RESULTS / "model_run1.jsonl"))  # transformers' ran for each format; the first are shown
    rows = {(row["experts"], row["weights"], row["batch"]): row for row in stored}
    for experts, weights, *figures in (line for line in lines if line[0] not in ("experts", "aim (int4)")):
        for batch, figure in zip((1, 16, 64, 8), figures, strict=True):
            row = rows[experts.removeprefix("transformers, "), weights, batch]
            found, digits = (row["prefill_ms"], 1) if batch == 8 else (row["graph_ms"], 2)
            assert figure == ("no room" if found is None else f"{found:.{digits}f}")


def test_rows_of_nvfp4_packing() -> None:
    """Of a GPU; every job was right."""
    for path in PACKING:
        assert f"| `{path.name}` |" in PAGE
        for row in rows_of(path):
            assert row["refused"] is None
            assert row["gpu"] is not None
            assert (row["commit"] == COPIED) == (path.stem in OF_COPIED)
            assert row["of_copy"] == row["copy_us"] / row["median_us"]


def test_every_stored_file_is_of_one_kind() -> None:
    assert sorted(RESULTS.glob("*.jsonl")) == sorted([*FILES, *BENCH, *GROUPED, *LORA, *POOL, *MODELS, *PACKING])
