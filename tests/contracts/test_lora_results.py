"""The stored results of the LoRA fold are what their page and docs/measured.md say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fanfold.kernels.lora.config import config_for
from fanfold.kernels.lora.sizes import FEW_ROWS, row_tile

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (RESULTS / "README.md").read_text().split("# The LoRA fold")[1]
MEASURED = (ROOT / "docs" / "measured.md").read_text().split("## The LoRA fold")[1]
EXPERTS, TOP_K, SLOTS, RANK = 128, 8, 4, 16
TOKENS = [1, 16, 64, 256, 1024, 4096, 16384]


def rows_of(run: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / f"lora_run{run}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("run", [1, 2])
def test_every_field_is_told(run: int) -> None:
    assert f"| `lora_run{run}.jsonl` |" in PAGE
    for row in rows_of(run):
        assert isinstance(row["us"], float)
        for name in row:
            assert f"`{name}`" in PAGE
        assert f"`{row['what'].split()[0]}" in PAGE


def figure(tokens: int, what: str) -> float:
    """Of run 2, with the config that the repository has for the batch."""
    rows = tokens * TOP_K
    tile = 8 if rows <= FEW_ROWS else row_tile(rows, EXPERTS, SLOTS)
    config = config_for(RANK, tile, torch.bfloat16, 90)
    wanted = [config.block_k, config.block_n, config.num_warps, config.num_stages]
    how = "rows" if rows <= FEW_ROWS else tile
    found = [r for r in rows_of(2) if (r["T"], r["what"], r["how"], r.get("cfg")) == (tokens, what, how, wanted)]
    return max(found, key=lambda row: row["enough"] <= 512 and row["enough"])["us"]


@pytest.mark.parametrize("what", ["gate_up", "down", "silu"])
def test_the_page_shows_the_figures_of_the_configs(what: str) -> None:
    cells = {
        line.split("|")[1].strip(): line.split("|")[2:-1] for line in MEASURED.splitlines() if line.count("|") == 9
    }
    if what == "silu":
        shown = [float(cell) for cell in cells["gate_up with SiLU behind it"]]
    else:
        parts = [cell.split("/") for cell in cells["order of rows / gate_up / down"]]
        shown = [float(part[1 if what == "gate_up" else 2]) for part in parts]
    for tokens, value in zip(TOKENS, shown, strict=True):
        assert abs(figure(tokens, what) - value) <= max(0.06, 0.005 * value), tokens
