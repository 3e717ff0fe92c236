"""diagnose: what this machine has, what runs on it and why not the rest, and one layer checked."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

import fanfold
from fanfold.bench.batches import random_batch
from fanfold.bench.checking import check
from fanfold.bench.jobs import FORMATS, LAYERS, LayerShape
from fanfold.bench.machine import commit
from fanfold.bench.weights import random_experts
from fanfold.kernels.common.tables import PACKAGE, user_folder
from fanfold.layers.experts import Experts, arch_of
from fanfold.select import OLDEST, verdicts
from fanfold.spec.job import LayerJob
from fanfold.spec.shape import ExpertShape
from fanfold.spec.verdict import Accepted, Rejected
from fanfold.spec.weight_format import WeightFormat

PACKAGES = ("torch", "triton", "transformers", "peft", "safetensors")
USUAL = LAYERS["qwen3-30b"]
SMOKE = LayerShape("smoke", ExpertShape(4, 256, 128), 2)
SMOKE_FORMAT = "gptq4-g128"
SMOKE_TOKENS = 8
Progress = Callable[[int, int, str], None]


def diagnose(*, progress: Progress | None = None) -> dict[str, Any]:
    """What runs here.

    Args:
        progress: called with (done, total, what).

    Returns:
        `versions` (a package that is not there: None), `machine`, `commit` (of a checkout), `gpus` (those that torch
        uses: name, arch, memory_bytes, and `refusal`: why no kernel runs there, or None), `cuda` (that torch was built
        for), `driver` (None without nvidia-smi), `unused` (why GPUs that nvidia-smi lists are not used, or None),
        `compiler` (the C compiler with which Triton builds its launchers, or None), `arch` (of the first GPU with
        kernels, else cpu), `runs` (a list: format, implementation and `rejected`, name -> reason, for a usual layer in
        bf16 on that arch), `tables` (of measured configs: path, gpu, measured, layers), `caches` (name, path, exists),
        `checks` (a layer of a few experts against fp32 on each device: device, implementation, error, limit, `wrong`:
        None or what is) and `ok`: nothing is wrong. A machine without a GPU is in order.
    """
    seen, gpus = _nvidia_smi(), _gpus()
    with_kernels = [torch.device("cuda", index) for index, gpu in enumerate(gpus) if gpu["refusal"] is None]
    arch = arch_of(with_kernels[0]) if with_kernels else "cpu"
    checks: list[dict[str, Any]] = []
    devices = [torch.device("cpu"), *with_kernels]
    for device in devices:
        if progress is not None:
            progress(len(checks), len(devices), f"checking a layer on {device}")
        checks.append(_checked(device))
    return {
        "versions": {
            "fanfold": fanfold.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "commit": commit(Path(fanfold.__file__).parent),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "driver": seen[0]["driver"] if seen else None,
        "unused": _unused(seen, gpus),
        "compiler": next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None),
        "arch": arch,
        "runs": [_runs(WeightFormat.parse(name), arch) for name in FORMATS],
        "tables": [_table(path) for path in (*sorted(user_folder().glob("*/*.json")), *sorted(PACKAGE.glob("*.json")))],
        "caches": [_cache("triton", path) for path in _triton_cache()],
        "checks": checks,
        "ok": all(found["wrong"] is None for found in checks),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    """What torch uses."""
    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        about = cast("Any", torch.cuda.get_device_properties(index))
        arch = arch_of(torch.device("cuda", index))
        found.append(
            {"name": about.name, "arch": arch, "memory_bytes": about.total_memory, "refusal": kernel_refusal(arch)}
        )
    return found


def kernel_refusal(arch: str) -> str | None:
    """Why no kernel runs on a GPU of that arch; None where they do."""
    if torch.version.hip is not None:
        return "torch is built for ROCm; kernels need an NVIDIA GPU"
    if int(arch.removeprefix("sm_")) < OLDEST:
        return f"kernels need compute capability {OLDEST / 10} or later"
    return None if find_spec("triton") else "Triton is not installed"


def _nvidia_smi() -> list[dict[str, str]]:
    """Name and driver of every GPU that the driver knows, whatever torch thinks of it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.strip()]
    return [{"name": row[0], "driver": row[-1]} for row in rows]


def _unused(seen: list[dict[str, str]], gpus: list[dict[str, Any]]) -> str | None:
    """Why torch uses none of the GPUs that are there."""
    if gpus or not seen:
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} finds no GPU: the driver may be too old, or CUDA_VISIBLE_DEVICES hides it"


def _runs(fmt: WeightFormat, arch: str) -> dict[str, Any]:
    found = verdicts(LayerJob(USUAL.experts, fmt, fmt, USUAL.activation.kind, torch.bfloat16), arch)
    return {
        "format": fmt.name,
        "implementation": next((verdict.kernel for verdict in found if isinstance(verdict, Accepted)), None),
        "rejected": {verdict.kernel: verdict.reason for verdict in found if isinstance(verdict, Rejected)},
    }


def _table(path: Path) -> dict[str, Any]:
    table = json.loads(path.read_text())
    return {"path": str(path), "gpu": table["gpu"], "measured": table["measured"], "layers": len(table["layers"])}


def _triton_cache() -> list[str]:
    if find_spec("triton") is None:
        return []
    from triton import knobs

    return [knobs.cache.dir]


def _cache(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "path": path, "exists": Path(path).is_dir()}


def _checked(device: torch.device) -> dict[str, Any]:
    """A small layer there against fp32; whatever goes wrong is what the caller wants to know."""
    report: dict[str, Any] = {"device": str(device), "format": SMOKE_FORMAT, "implementation": None}
    try:
        weights = random_experts(SMOKE, WeightFormat.parse(SMOKE_FORMAT), device, seed=0)
        batch = random_batch(SMOKE, SMOKE_TOKENS, "uniform", torch.bfloat16, device, seed=0)
        experts = Experts(weights, SMOKE.activation, dtype=torch.bfloat16)
        report["implementation"] = experts.implementation
        found = check(experts, weights, batch)
    except Exception as error:
        return {**report, "error": None, "limit": None, "wrong": f"{type(error).__name__}: {error}"}
    return {**report, "error": found.error, "limit": 2 * found.plain_error, "wrong": found.wrong}
