"""The machine of a row, and the commit of the code that ran."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from fanfold.bench.machine import commit, device_named, machine
from fanfold.errors import UnavailableError


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    return subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_machine() -> None:
    found = machine(torch.device("cpu"))
    assert found["gpu"] is None
    assert found["torch"] == torch.__version__
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
    assert re.search(r"\d+ CPUs", found["machine"])


def test_commit_and_edits(tmp_path: Path) -> None:
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("one = 1\n")
    git(tmp_path, "init", "--quiet")
    assert commit(package) is None  # not part of the checkout it lies in
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "notes").write_text("not the package\n")
    assert commit(package) == head
    (package / "__init__.py").write_text("one = 2\n")
    assert commit(package) == f"{head}-dirty"


def test_no_checkout(tmp_path: Path) -> None:
    assert commit(tmp_path) is None


def test_devices() -> None:
    assert device_named("cpu") == torch.device("cpu")
    there = torch.cuda.is_available()
    assert device_named().type == ("cuda" if there else "cpu")
    if not there:
        with pytest.raises(UnavailableError, match="--device cpu"):
            device_named("cuda")
