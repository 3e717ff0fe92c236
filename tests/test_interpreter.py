"""Starts the cases for Triton's interpreter, in two processes that take about as long as each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from interpreter import FILES_WITH_CASES, run_in_interpreter

CASE = re.compile(r"\bdevice: str\b|mark\.interpreter\b")
FILES = [path for path in sorted(Path(__file__).parent.rglob("test_*.py")) if CASE.search(path.read_text())]


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped products", "all others"])
def test_in_the_interpreter(grouped: bool) -> None:
    run_in_interpreter([path for path in FILES if ("grouped" in path.parts) is grouped])


def test_no_file_is_left_out(request: pytest.FixtureRequest) -> None:
    assert request.config.stash[FILES_WITH_CASES] <= set(FILES)
