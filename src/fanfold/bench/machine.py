"""Machine: what a figure depends on beside the code, and which code it was."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

import fanfold
from fanfold.errors import UnavailableError


def device_named(name: Literal["cuda", "cpu"] | None = None) -> torch.device:
    """The device of that name; of none, a GPU where there is one.

    Raises:
        UnavailableError: there is no GPU that torch can use.
    """
    found = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if found == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            "device cuda",
            found="no GPU that torch can use",
            expected="an NVIDIA GPU, and a CUDA build of torch",
            next_step="Time the reference on the CPU: --device cpu.",
        )
    return torch.device("cuda", torch.cuda.current_device()) if found == "cuda" else torch.device("cpu")


def machine(device: torch.device) -> dict[str, Any]:
    """Facts for a row of results: `machine`, `gpu` (None on a CPU), versions, `commit` and `date` (UTC)."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fanfold": fanfold.__version__,
        "commit": commit(Path(fanfold.__file__).parent),
        "date": datetime.now(UTC).date().isoformat(),
    }


def commit(package: Path) -> str | None:
    """The commit of the checkout that this package's code is part of, `-dirty` where it was edited; None elsewhere."""
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:  # e.g. installed inside another checkout
        return None
    head = _git(package, "rev-parse", "HEAD")
    edited = _git(package, "status", "--porcelain", "--", ".")
    return head if head is None or not edited else f"{head}-dirty"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
