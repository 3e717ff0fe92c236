"""`fanfold doctor`: what it prints, and its exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from fanfold.cli import output
from fanfold.cli.app import app


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)


def report(**other: Any) -> dict[str, Any]:
    """Of a machine with a GPU whose layer is wrong."""
    refused = {"grouped_int4_sm90": "gate_up: bf16: runs 4-bit gptq"}
    return {
        "versions": {"fanfold": "1", "torch": "2", "triton": None},
        "machine": "Linux",
        "commit": None,
        "gpus": [{"name": "NVIDIA H200", "arch": "sm_90", "memory_bytes": 150 * 10**9, "refusal": None}],
        "cuda": "13.0",
        "driver": "580",
        "unused": None,
        "compiler": None,
        "arch": "sm_90",
        "runs": [
            {"format": "bf16", "implementation": "grouped", "rejected": {**refused, "reference": "a check"}},
            {"format": "nvfp4", "implementation": "grouped_int4_sm90", "rejected": {"reference": "a check"}},
        ],
        "tables": [],
        "caches": [{"name": "triton", "path": "/cache", "exists": False}],
        "checks": [
            {"device": "cuda:0", "format": "gptq4-g128", "implementation": "grouped", "error": 0.5, "limit": 0.01}
            | {"wrong": "relative error 5.0e-01, limit 1.0e-02"}
        ],
        "ok": False,
    } | other


def test_this_machine_is_in_order() -> None:
    shown = call()
    assert shown.exit_code == 0
    assert "ok  gptq4-g128 experts, reference, " in shown.stdout
    found = json.loads(call("--json").stdout)
    assert found["ok"]
    assert found["checks"][0]["wrong"] is None


def test_a_failed_check_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 120)
    monkeypatch.setattr("fanfold.diagnosis.diagnose", lambda **_: report())
    shown = call()
    assert shown.exit_code == 1
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    for line in (
        "triton not installed",
        "cuda:0 NVIDIA H200, sm_90, 150.0 GB",
        "C compiler none found: Triton needs one where there is a GPU",
        "Runs on sm_90",
        "grouped bf16",
        "grouped_int4_sm90 nvfp4",
        "not grouped_int4_sm90 gate_up: bf16: runs 4-bit gptq (bf16)",
        "not reference a check",
        "triton cache /cache (not there yet)",
    ):
        assert line in lines
    assert "cuda:0 WRONG gptq4-g128 experts, grouped, 5.0e-01 from fp32, limit 1.0e-02: relative error" in " ".join(
        lines
    )
    assert call("--json").exit_code == 1
