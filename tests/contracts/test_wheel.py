"""The wheel: built, installed into an empty environment, and asked to inspect a checkpoint there."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "tests" / "golden" / "gptqmodel_mixtral_w4_g32"


def run(*command: str | Path, cwd: Path) -> str:
    ours = ("PYTHON", "PYTEST")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "fanfold/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert all(name.startswith(("fanfold/", "fanfold-")) for name in names)
    assert not any(name.endswith((".pyc", ".safetensors", ".pt")) for name in names)


def test_installed_wheel_inspects_a_checkpoint(wheel: Path, tmp_path: Path) -> None:
    """fanfold comes from the wheel, its dependencies from the environment of the tests: no network."""
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    where = run(python, "-c", "import fanfold; print(fanfold.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path)

    printed = run(python.with_name("fanfold"), "inspect", CHECKPOINT, "--json", cwd=tmp_path)
    report = json.loads(printed)
    assert report["kind"] == "checkpoint"
