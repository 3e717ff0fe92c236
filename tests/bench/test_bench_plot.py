"""Roofline pictures hold the figures of their rows."""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from fanfold.bench.plot import caption, plot
from fanfold.errors import ArgumentError, UnavailableError

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (ROOT / "benchmarks" / "results" / "bench_run1.jsonl").read_text().splitlines()
]
FOUR_BITS = [row for row in ROWS if row["format"] in ("gptq4-g128", "awq4-g128-asym", "nvfp4", "mxfp4")]


def lines_of(svg: str) -> list[int]:
    """Points of each line with markers."""
    return [path.count("L") + 1 for path in re.findall(r'<g id="line2d_\d+">\s*<path d="([^"]+)" clip-path', svg)]


def test_four_files(tmp_path: Path) -> None:
    written = plot(FOUR_BITS, tmp_path / "made", "name")
    assert [path.name for path in written] == [f"name-{t}.{k}" for t in ("light", "dark") for k in ("svg", "png")]
    svg = written[0].read_text()
    for text in ("qwen3-30b", "mixtral-8x7b", "gptq4-g128", "mxfp4", "4096", "% of the roof", caption(FOUR_BITS)):
        assert f">{text}</text>" in svg
    assert lines_of(svg).count(4) >= 2 * 2 * 4  # layers, panels, formats; each over 4 numbers of tokens
    assert written[1].read_bytes().startswith(b"\x89PNG")
    again = plot(FOUR_BITS, tmp_path / "again", "name")
    assert again[0].read_bytes() == written[0].read_bytes()
    assert "#0d1117" in again[2].read_text()
    assert "#0d1117" not in svg


def test_the_caption_tells_the_conditions() -> None:
    assert caption(FOUR_BITS) == (
        "NVIDIA H200; bfloat16 activations, uniform routing; medians of graph replays; "
        "torch 2.11.0+cu130, Triton 3.6.0, commit 7c94a9b, 2026-12-01"
    )
    assert "routing, 4 adapters of rank 16; " in caption([{**ROWS[0], "adapters": 4, "rank": 16}])


def test_a_cell_that_misses_its_figure_is_left_out(tmp_path: Path) -> None:
    rows = [{**FOUR_BITS[0], "median_us": None}, *FOUR_BITS[1:4]]
    svg = plot(rows, tmp_path)[0].read_text()
    assert 3 in lines_of(svg)
    assert 4 not in lines_of(svg)


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"median_us": None}, "1 rows, none with a figure and a floor"), ({"gpu": "Another"}, "rows of Another")],
)
def test_nothing_to_draw(changes: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"found {found}; expected verified figures of a GPU"):
        plot([ROWS[0] | changes], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(UnavailableError, match=r"pip install 'fanfold\[plot\]'"):
        plot(FOUR_BITS, tmp_path)


def test_the_picture_of_the_readme(tmp_path: Path) -> None:
    """As `fanfold bench --rows benchmarks/results/bench_run1.jsonl --format ... --plot docs/pictures` draws it."""
    pinned = re.search(r"^matplotlib==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    kept = {path.name: path for path in (ROOT / "docs" / "pictures").iterdir()}
    assert set(kept) == {"roofline-light.svg", "roofline-dark.svg"}
    for path in plot(FOUR_BITS, tmp_path):
        if path.suffix == ".svg" and version("matplotlib") == pinned[1]:
            assert path.read_text() == kept[path.name].read_text()
    assert all(f"docs/pictures/{name}" in (ROOT / "README.md").read_text() for name in kept)
