"""Starts this folder's cases in Triton's interpreter: one process for all, as a start takes longer than most cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from interpreter import run_in_interpreter


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_in_interpreter(str(Path(__file__).parent))
