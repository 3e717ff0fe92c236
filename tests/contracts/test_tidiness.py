"""Sizes of files, leftovers, and that the repository speaks of no one's machine."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
TEXTS = [
    path
    for folder in ("src", "tests", "docs", "examples", "benchmarks")
    for pattern in ("*.py", "*.md", "*.json", "*.yaml")
    for path in sorted((ROOT / folder).rglob(pattern))
    if path.name != "tokenizer.json"
] + [path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git"]

LEFTOVERS = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError|NotImplemented)\b|# *type: *ignore|(?<![\w.])print\(")
HOMES = re.compile(r"(?<![\w.])/(?:home|root|work|Users)/")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_size_budget(path: Path) -> None:
    budget = 400 if "kernels" in path.parts else 300
    assert len(path.read_text().splitlines()) <= budget, "split it by idea"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_leftovers(path: Path) -> None:
    assert [match[0] for match in LEFTOVERS.finditer(path.read_text())] == []


def test_no_paths_of_one_machine() -> None:
    assert len(TEXTS) > 100
    others = [path for path in TEXTS if path != Path(__file__)]
    found = [relative(path) for path in others if HOMES.search(path.read_text(errors="replace"))]
    assert found == []


def test_test_files_have_unlike_names() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_the_example_stays_small() -> None:
    """What users clone for the demo: at most 20 MB."""
    total = sum(path.stat().st_size for path in (ROOT / "examples").rglob("*") if path.is_file())
    assert 10_000_000 < total <= 20_000_000
