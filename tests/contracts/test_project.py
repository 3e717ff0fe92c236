"""The project file, the pinned versions and CI fit each other."""

import os
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fanfold
from interpreter import FILES_WITH_GPU_TESTS

ROOT = Path(__file__).parents[2]
FILE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = FILE["project"]


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower(): version for name, version in pairs}


def test_every_dependency_is_pinned_inside_its_range() -> None:
    extras = PROJECT["optional-dependencies"].values()
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(line)
        assert pinned()[requirement.name] in requirement.specifier, line


def test_triton_is_left_to_torch() -> None:
    """A CUDA build of torch pins its own triton; a constraint of ours would contradict it."""
    assert "triton" not in pinned()


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    commands = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "exec make test"]


def test_make_gpu_test_finds_every_file_with_gpu_tests(request: pytest.FixtureRequest) -> None:
    """Of those that this run has collected."""
    words = re.search(r"grep -rlE '(.+)' tests", (ROOT / "Makefile").read_text())
    assert words
    for path in request.config.stash[FILES_WITH_GPU_TESTS]:
        assert re.search(words[1], path.read_text()), path


def test_changelog_has_this_version() -> None:
    assert f"## [{fanfold.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_only_device_functions_go_without_types() -> None:
    for name in FILE["tool"]["pyright"]["ignore"]:
        text = (ROOT / name).read_text()
        assert "@triton.jit" in text or "@gluon.jit" in text, f"{name} holds no device function"
