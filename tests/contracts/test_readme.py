"""Nothing in the README is false: every block runs, every sample output is what comes out, every link resolves."""

import doctest
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from format_table import table

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]\[]*\]\(([^)\s]+)\)")
NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[-+]\d+)?")
DOCUMENTS = [path for path in ROOT.rglob("*.md") if not {".venv", "node_modules"} & set(path.parts)]


def blocks(*languages: str) -> list[str]:
    found = FENCE.findall(README.read_text()) if README.exists() else []
    return [code for language, code in found if language in languages]


def sample_commands() -> list[tuple[str, str]]:
    """(command, the output shown below it) of every `$ ` line in the console blocks."""
    found: list[tuple[str, str]] = []
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.replace("\\\n", " ").partition("\n")
            found.append((command, output))
    return found


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    binaries = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


def test_it_is_short_and_has_blocks_of_every_kind() -> None:
    assert len(README.read_text().splitlines()) < 200
    assert blocks("python")
    assert blocks("bash")
    assert blocks("console")


def test_fences_are_of_known_languages() -> None:
    """`text` is not run; everything that looks like code is."""
    assert {language for language, _ in FENCE.findall(README.read_text())} <= {"python", "bash", "console", "text"}


@pytest.mark.parametrize("code", blocks("python"))
def test_python_block_runs(code: str) -> None:
    done = run([sys.executable, "-W", "error", "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", [line for block in blocks("bash") for line in block.splitlines() if line.strip()])
def test_bash_line_runs(line: str) -> None:
    """`make` lines are only tried for their target: one of them is what runs this test."""
    words = shlex.split(line, comments=True)
    command = ["make", "--dry-run", *words[1:]] if words[0] == "make" else ["bash", "-ec", line]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("command", "shown"), sample_commands())
def test_sample_output_is_true(command: str, shown: str) -> None:
    """Numbers may differ, and `...` stands for anything."""
    done = run(["bash", "-ec", command])
    assert done.returncode == 0, done.stderr
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    wanted, got = (NUMBER.sub("N", text.strip()) + "\n" for text in (shown, done.stdout))
    assert doctest.OutputChecker().check_output(wanted, got, flags), f"now it prints:\n{done.stdout}"


def test_table_of_formats_is_the_codes() -> None:
    assert table() in README.read_text(), f"the code says:\n{table()}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    for link in LINK.findall(FENCE.sub("", document.read_text())):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = document if not name else (document.parent / name).resolve()
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", document.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
