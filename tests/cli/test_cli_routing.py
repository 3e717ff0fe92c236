"""`fanfold routing`: the tables, the page, and wrong use."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from fanfold.cli import output
from fanfold.cli.app import app
from fanfold.cli.routing import BARS, bars
from fanfold.cli.routing_levels import CHANGES, LEVELS, change_of, level_of
from fanfold.cli.routing_page import DARK, LIGHT, page

TINY = Path(__file__).parents[2] / "examples" / "tiny-moe"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 110)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["routing", *arguments], catch_exceptions=False)


def layer(number: int, counts: list[int], changed: float | None = None) -> dict[str, Any]:
    """An entry of a report; the figures are other ones than those of the counts, and so are seen to be printed."""
    figures = {"top_k": 2, "counts": counts, "max_over_mean": 2.5, "fullest": 3, "entropy": 1.25, "effective": 2.4}
    return {"layer": number, **figures, "unused": 1, "changed": changed, "moved": changed and changed / 2}


def report(experts: int = 4) -> dict[str, Any]:
    more = [8] * (experts - 4)
    base = [layer(1, [0, 8, 8, 16, *more]), layer(2, [8, 8, 8, 8, *more])]
    shout = [layer(1, [16, 8, 8, 0, *more], 0.5), layer(2, [8, 7, 8, 9, *more], 0.0625)]
    facts = {"path": "models/<tiny>", "model_type": "qwen3_moe", "text": "a & b.txt", "tokens": 1234, "window": 512}
    return {**facts, "runs": [{"adapter": None, "layers": base}, {"adapter": "<shout>", "layers": shout}]}


def test_levels() -> None:
    assert [level_of(load) for load in (0, 0.01, 0.25, 0.74, 1, 1.25, 2, 3.9, 4, 99)] == [0, 1, 2, 3, 4, 5, 6, 6, 7, 7]
    assert [change_of(d) for d in (-2, -0.6, -0.3, -0.2, 0, 0.1, 0.3, 0.5, 1)] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert len(BARS) == len(LIGHT.load) == len(DARK.load) == len(LEVELS) + 2
    assert len(LIGHT.change) == len(DARK.change) == len(CHANGES) + 1


def test_bars() -> None:
    assert bars([0, 8, 8, 16]) == BARS[0] + BARS[4] + BARS[4] + BARS[6]
    assert bars([8] * 128 + [0, 16] * 64) == BARS[4] * 64  # four experts a bar


def test_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[Any] = []

    def usage(*arguments: Any, **_: Any) -> dict[str, Any]:
        given.extend(arguments)
        return report()

    monkeypatch.setattr("fanfold.expert_usage.expert_usage", usage)
    file = tmp_path / "page.html"
    shown = call("model", "--text", "words.txt", "--adapter", "shout=there", "--html", str(file))
    assert shown.exit_code == 0
    assert given == [Path("model"), Path("words.txt"), {"shout": Path("there")}]
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert lines[0] == "models/<tiny> qwen3_moe, 1,234 tokens of a & b.txt"
    assert f"1 {bars([0, 8, 8, 16])} 2.50 1.25 2.4 1" in lines
    assert f"1 {bars([16, 8, 8, 0])} 2.50 1.25 2.4 1 50.0% 25.0%" in lines
    assert file.read_text() == page(report())
    assert json.loads(call("model", "--text", "words.txt", "--json").stdout) == report()


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = page(report())
    root = ElementTree.fromstring(text)
    assert root.findtext("head/title") == "Experts that a & b.txt uses"
    assert [heading.text for heading in root.iter("h2")] == ["base", "<shout>", "Words"]
    assert {element.tag for element in root.iter()}.isdisjoint({"script", "link", "img", "iframe", "object"})
    outside = [url for url in re.findall(r"https?://[^\"\s]*", text) if url != "http://www.w3.org/2000/svg"]
    assert outside == []
    assert "url(" not in text
    assert "@import" not in text
    for scheme in (LIGHT, DARK):
        assert scheme.variables() in text
    assert text.index("prefers-color-scheme:dark") < text.index(DARK.variables())
    used = set(re.findall(r'class="([ld]\d)"', text))
    assert used <= set(re.findall(r"\.([ld]\d)\{fill", text))


def test_the_maps_show_the_counts() -> None:
    root = ElementTree.fromstring(page(report()))
    maps = {str(svg.findtext(f"{SVG}title")): svg for svg in root.iter(f"{SVG}svg")}
    assert set(maps) == {
        "Load of the experts, base",
        "Change of the load of the experts, <shout>",
        "Load of the experts, <shout>",
    }
    base = list(maps["Load of the experts, base"].iter(f"{SVG}rect"))
    assert Counter(cell.get("class") for cell in base) == {"l0": 1, "l4": 6, "l6": 1}
    assert base[3].findtext(f"{SVG}title") == "layer 1, expert 3: 16 rows, 2.00 times the mean"
    changed = list(maps["Change of the load of the experts, <shout>"].iter(f"{SVG}rect"))
    assert [cell.get("class") for cell in changed] == ["d8", "d4", "d4", "d0", "d4", "d3", "d4", "d5"]
    assert changed[0].findtext(f"{SVG}title") == "layer 1, expert 0: from 0.00 to 2.00 times the mean"
    rows = [[cell.text for cell in row] for row in root.iter("tr")]
    assert rows[-2] == ["1", "2.50", "3", "1.25", "2.4", "1", "50.0%", "25.0%"]


@pytest.mark.parametrize("experts", [8, 128, 512])
def test_cells_of_any_number_of_experts_lie_in_the_map(experts: int) -> None:
    for svg in ElementTree.fromstring(page(report(experts))).iter(f"{SVG}svg"):
        width = float(svg.get("viewBox", "").split()[2])
        cells = list(svg.iter(f"{SVG}rect"))
        ends = [float(cell.get("x", "0")) + float(cell.get("width", "0")) for cell in cells]
        assert len(cells) == 2 * experts
        assert max(ends) <= width <= 950
        assert len(list(svg.iter(f"{SVG}text"))) <= 2 + 40  # numbers of experts do not run into each other


# What a browser makes of the page, written where --dump-dom shows it.
ASK = """<script>
const boxes = [...document.querySelectorAll("rect")].map(cell => cell.getBoundingClientRect());
const style = getComputedStyle(document.body), root = getComputedStyle(document.documentElement);
document.body.dataset.found = JSON.stringify({
  rects: boxes.length,
  shown: boxes.filter(box => box.width > 0 && box.height > 0).length,
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  colours: [style.backgroundColor, root.backgroundColor, style.color],
  fills: new Set([...document.querySelectorAll("rect")].map(cell => getComputedStyle(cell).fill)).size,
  fetched: performance.getEntriesByType("resource").length,
  words: document.body.innerText,
})
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    """In light and dark: all cells have a size, nothing is cut off at the side, nothing is fetched, no error."""
    whole = page(report())
    file = tmp_path / "page.html"
    file.write_text(whole.replace("</body>", f"{ASK}</body>") if "</body>" in whole else whole + ASK)
    colours: list[list[str]] = []
    for scheme in (0, 1):  # dark, light
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,800"]
        command += [f"--blink-settings=preferredColorScheme={scheme}", "--enable-logging=stderr", "--dump-dom"]
        done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "CONSOLE" not in done.stderr
        (shown,) = re.findall(r'data-found="([^"]*)"', done.stdout)
        found = json.loads(unescape(shown))
        assert found["rects"] == found["shown"] == whole.count("<rect") > 0
        assert (found["wide"], found["fetched"]) == (0, 0)
        assert found["fills"] > 4  # levels are told apart
        assert "models/<tiny>" in found["words"]
        colours.append(found["colours"])
    assert colours[0] != colours[1]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "x", "--adapter", "shout"], "--adapter"),
        (["--text", "x", "--html", "nowhere/page.html"], "--html"),
        (["--text", "x", "--html", "."], "--html"),
    ],
)
def test_wrong_use(arguments: list[str], what: str) -> None:
    found = call(str(TINY / "gptq-int4"), *arguments, "--json")
    assert found.exit_code == 2
    assert what in json.loads(found.stdout)["what"]
