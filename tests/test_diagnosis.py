"""diagnose: what is here, as it is, and a layer that is wrong is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fanfold
from fanfold import diagnosis
from fanfold.diagnosis import diagnose, kernel_refusal
from fanfold.kernels.grouped.sm90.tuned import read_table
from fanfold.layers.experts import Experts
from fanfold.spec.launch import LaunchConfig
from user_tables import user_folder, write


def check_on_cpu() -> dict[str, Any]:
    return next(check for check in diagnose()["checks"] if check["device"] == "cpu")


def test_this_machine() -> None:
    asked: list[tuple[int, int, str]] = []
    found = diagnose(progress=lambda *step: asked.append(step))
    assert found["ok"]
    assert found["versions"]["fanfold"] == fanfold.__version__
    assert found["versions"]["torch"] == torch.__version__
    assert [table["layers"] for table in found["tables"]] == [len(read_table())]
    assert asked[0] == (0, len(found["checks"]), "checking a layer on cpu")
    smoke = found["checks"][0]
    assert smoke["implementation"] == "reference"
    assert 0 < smoke["error"] < smoke["limit"] < 0.02
    if not torch.cuda.is_available():
        assert (found["arch"], found["gpus"], len(found["checks"])) == ("cpu", [], 1)
        assert {row["implementation"] for row in found["runs"]} == {"reference"}
        assert found["runs"][0]["rejected"]["grouped"] == "needs an NVIDIA GPU"


def test_the_users_tables_come_first(tmp_path: Path) -> None:
    config = LaunchConfig(32, 64, 16, 4, 3, False, 16)
    with user_folder(tmp_path):
        path = write("grouped", ("nvfp4", 8, 2, 256, 128, 1), config, config, "NVIDIA L4", "sm_89")
        tables = diagnose()["tables"]
    assert (tables[0]["path"], tables[0]["gpu"], tables[0]["layers"]) == (str(path), "NVIDIA L4", 1)
    assert len(tables) == 2


@pytest.mark.gpu
def test_a_gpu_is_checked_too() -> None:
    found = diagnose()
    assert found["ok"]
    assert found["driver"]
    assert found["checks"][1]["device"] == "cuda:0"
    assert found["checks"][1]["implementation"] != "reference"


def test_a_layer_that_is_slightly_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Experts.forward

    def off(self: Experts, *arguments: Any) -> Tensor:
        return forward(self, *arguments) * 1.03

    monkeypatch.setattr(Experts, "forward", off)
    assert not diagnose()["ok"]
    assert check_on_cpu()["wrong"].startswith("relative error 3")


def test_a_layer_that_raises_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(Experts, "forward", broken)
    found = check_on_cpu()
    assert (found["implementation"], found["error"]) == ("reference", None)
    assert found["wrong"] == "RuntimeError: no compiler"


def test_gpus_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_refusal("sm_90") is None
    assert kernel_refusal("sm_75") == "kernels need compute capability 8.0 or later"
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    assert kernel_refusal("sm_90") == "Triton is not installed"
    assert diagnose()["caches"] == []
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in str(kernel_refusal("sm_94"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch uses the GPUs")
def test_a_gpu_that_torch_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    found = diagnose()
    assert found["driver"] == "580.65.06"
    assert found["unused"].startswith(f"torch {torch.__version__}")
    assert found["ok"]
