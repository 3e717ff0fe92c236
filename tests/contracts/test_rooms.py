"""The rooms of the package: which may import which (import-linter), and which packages each may know."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "fanfold"

# Packages beside the standard library and fanfold that a room may import, anywhere in its files.
KNOWS: dict[str, set[str]] = {
    "__init__": {"torch"},
    "errors": set(),
    "spec": {"torch"},
    "formats": {"torch", "safetensors"},
    "lora": {"torch", "safetensors"},
    "routing": {"torch", "triton"},
    "kernels": {"torch", "triton"},
    "ops": {"torch"},
    "select": {"torch"},
    "reference": {"torch"},
    "layers": {"torch"},
    "load": {"torch"},
    "bench": {"matplotlib", "safetensors", "torch"},
    "diagnosis": {"torch", "triton"},
    "tune": {"torch"},
    "distributed": {"torch"},
    "expert_usage": {"torch"},
    "throughput": {"torch"},
    "explanation": {"torch"},
    "export": {"torch", "triton"},
    "inspection": set(),
    "quantization": {"torch"},
    "verification": {"torch"},
    "integrations": {"torch", "transformers", "safetensors", "peft"},
    "cli": {"typer", "rich"},
}


def room(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


def imported_packages(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"fanfold"}


def test_rooms_import_downwards_only() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 broken" in run.stdout


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_room_knows_only_its_packages(path: Path) -> None:
    assert room(path) in KNOWS, f"{path.name}: say in KNOWS which packages the new room may import"
    assert imported_packages(path) <= KNOWS[room(path)]


def test_every_package_a_room_may_know_is_declared() -> None:
    """What `src` imports is a dependency in pyproject.toml (triton comes with torch)."""
    declared = (ROOT / "pyproject.toml").read_text()
    for package in set().union(*KNOWS.values()) - {"triton"}:
        assert f'"{package}>=' in declared
