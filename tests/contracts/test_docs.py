"""The pages of docs/: blocks are what the code says now, keys of --json are complete, all pages are in the nav."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_blocks import DOCS, PAGES, ROOT, masked, renewed, run, session
from docs_keys import KEYS, differences

from fanfold.cli.app import app
from fanfold.ops import OPS

NEXT_STEP = "the code says something else now: run `make docs-blocks`, and read the diff"
OPERATIONS = re.compile(r"<!-- table: operations (.+?) -->")
COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages show a machine without one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def relative(path: Path) -> str:
    return str(path.relative_to(DOCS))


def generated(path: Path) -> bool:
    return "```console" in path.read_text() or "<!-- table:" in path.read_text()


@pytest.mark.parametrize("path", [path for path in PAGES if generated(path)], ids=relative)
def test_what_the_code_says_is_up_to_date(path: Path) -> None:
    page = path.read_text()
    assert renewed(page) == page, NEXT_STEP


@pytest.mark.parametrize(
    ("path", "command", "rows"),
    [
        pytest.param(path, *found.groups(), id=f"{relative(path)}: {found[1][:40]}")
        for path in PAGES
        for found in KEYS.finditer(path.read_text())
    ],
)
def test_keys_of_json_are_complete(path: Path, command: str, rows: str) -> None:
    _, text = run([*shlex.split(command), "--json"])
    text, _, _ = text.partition("\nerror: ")
    missing, gone = differences(rows, text)
    assert (missing, gone) == (set(), set())


def test_every_command_has_a_page_that_runs_it() -> None:
    for command in COMMANDS:
        page = (DOCS / "commands" / f"{command}.md").read_text()
        assert f"$ fanfold {command}" in page
        assert f"<!-- table: options {command} -->" in page
        assert command == "demo" or "<!-- keys: " in page


def test_every_operation_is_on_a_page_of_kernels() -> None:
    """Overloads for numbers of the host stand with the others."""
    found = [name for path in PAGES for names in OPERATIONS.findall(path.read_text()) for name in names.split()]
    assert sorted(found) == sorted(name for name in OPS if not name.endswith(".host"))


def test_files_that_pages_name_exist() -> None:
    pages = [
        *DOCS.rglob("*.md"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", page.read_text())
    }
    assert len(named) > 30
    assert [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_nav_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(entries(nav)) == sorted(relative(path) for path in PAGES)


def entries(nav: Any) -> Iterator[str]:
    """Files that a nav names."""
    if isinstance(nav, str):
        yield nav
    else:
        for inner in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(inner)


def test_the_site_fetches_nothing() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert config["plugins"] == ["search"]
    for path in PAGES:
        assert not re.search(r"(?:!\[[^\]]*\]\(|src=\")https?:", path.read_text()), path


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links between pages, anchors, and pages that are not in the nav: as `make docs` has them."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    page = (tmp_path / "site" / "measured.html").read_text()
    assert "<code>benchmarks/results/README.md</code>" in page  # no page of the site, so no link
    assert 'href="../' not in page


def test_a_session_keeps_what_differs_from_run_to_run_alone() -> None:
    """A figure may stand as it is; a word may not."""
    shown = "$ fanfold inspect nowhere\nerror: nowhere\n    found     such a directory\n$ echo $?\n0\n"
    new = session(shown)
    assert "no such directory" in new
    assert new.endswith("$ echo $?\n2\n")
    assert session(new) == new


def test_masks_hide_no_more_than_they_should() -> None:
    assert masked("verify", "  0   nvfp4  2.5e-07") == masked("verify", "0 nvfp4  3.1e-09\n").rstrip()
    assert masked("verify", "relative 1%") != masked("verify", "relative 2%")
    rows = [f" gptq4-g128      1 {us}   12% 4e-05 0.0099 3.2e-03" for us in ("10,235", "9.1")]
    assert masked("bench", rows[0]) == masked("bench", rows[1]) == "gptq4-g128 1"
    assert masked("generate", "[0] base  3 tokens, 5.0 tokens/s\nThe sea\n\n") != masked("generate", "[0] base")
    table = "   0   base     The sea   and {} 2.2\n                          {}\n Loaded"
    assert masked("demo", table.format("so", "on")) == masked("demo", table.format("then", "the king")) != ""
