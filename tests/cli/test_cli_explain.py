"""`fanfold explain`: sizes or a checkpoint in, the library's answer out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fanfold import explain
from fanfold.cli import output
from fanfold.cli.app import app
from fanfold.cli.explain import ranges
from fanfold.explanation import explain_checkpoint
from fanfold.kernels.grouped.sm90.config import Sm90Config
from samples import sample
from user_tables import user_folder, write

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-moe" / "gptq-int4")
LAYER = ["--shape", "16,2048,768,128,8", "--format", "gptq4-g128"]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.out, "width", 100)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_json_is_what_the_library_says() -> None:
    found = call(*LAYER, "--arch", "90", "--adapters", "4", "--rank", "8", "--json")
    assert json.loads(found.stdout) == explain((128, 2048, 768), "gptq4-g128", 90, 128, 8, 4, 8)
    model = call(TINY, "--arch", "90", "--tokens", "5", "--json")
    assert json.loads(model.stdout) == explain_checkpoint(TINY, 90, 5)


def test_a_measured_layer() -> None:
    answer = explain((128, 2048, 768), "gptq4-g128", 90, 128, 8)
    shown = lines(call(*LAYER, "--arch", "90").stdout)
    assert "batch 16 tokens of 8 experts, 128 rows" in shown
    assert "runs grouped_int4_sm90" in shown
    gate_up = answer["launches"][1]
    assert f"gate_up kernels/grouped/sm90 {gate_up['config']} {answer['expected_us']['gate_up']}" in shown
    assert "table grouped_int4_sm90.json: this layer, int4 16,2048,768,128,8" in shown
    part = answer["expected_us"]["floor"] / answer["expected_us"]["layer"]
    assert f"expected {answer['expected_us']['layer']} us, as measured, {part:.0%} of the roof" in shown
    assert "(82.4 of 128 experts met); " in " ".join(shown)
    assert f"gate_up 207.6 MB {answer['parts']['gate_up']['flops']:,}" in shown


def test_a_row_of_fanfold_tune(tmp_path: Path) -> None:
    config = Sm90Config(8, 8, 1, 1, 128, 4, 1, True)
    with user_folder(tmp_path):
        write("grouped_int4_sm90", ("int4", 128, 8, 2048, 768, 16), config, config, chained=True, run=0)
        shown = lines(call(*LAYER, "--arch", "90").stdout)
    assert "gate_up kernels/grouped/sm90 t8-w1x1-k128-s4-sum" in shown  # its steps were not measured
    assert "expected 12.5 us, as measured, 32% of the roof" in shown
    assert any(line.startswith("measured 20") and line.endswith(" on NVIDIA H200") for line in shown)


def test_another_layer_on_another_gpu_with_adapters() -> None:
    shown = lines(call("--shape", "1,256,128,16,4", "--format", "nvfp4", "--arch", "89", "--adapters", "2").stdout)
    assert "batch 1 token of 4 experts, 4 rows, 2 adapters of rank 16" in shown
    assert "not grouped_int4_sm90 needs a Hopper GPU (sm_90)" in shown
    assert "configs.py, 99 KiB: packed, alone, 16 rows a tile" in shown
    assert any(line.startswith("gate_up fold kernels/lora t8-r16-k128-n128") for line in shown)
    assert "floor not known for this device" in shown
    assert "never run kernels on sm_89: compiled, never run" in shown


def test_a_config_that_was_changed() -> None:
    shown = " ".join(lines(call("--shape", "16,2048,192,128,8", "--format", "gptq4-g64", "--arch", "90").stdout))
    assert "this layer" not in shown
    assert "needs at least two steps of block_k" in shown


def test_a_checkpoint() -> None:
    shown = lines(call(TINY).stdout)
    assert shown[0].endswith("gptq-int4 qwen3_moe")
    assert "layers 0-3" in shown
    assert "sizes 16 experts, hidden 256, intermediate 128" in shown
    assert "runs reference" in shown


def test_activations_of_a_checkpoint() -> None:
    shown = lines(call(str(sample("nvfp4")), "--arch", "90").stdout)
    assert "format nvfp4-divisor, bfloat16 activations rounded to nvfp4" in shown
    assert "x to nvfp4 kernels/nvfp4/round" in shown
    assert not any(line.startswith("never run") for line in shown)


def test_ranges() -> None:
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "--shape"),
        (["--shape", "16,256,128,16", "--format", "bf16"], "--shape"),
        (["--shape", "16,256,128,16,17", "--format", "bf16"], "--shape"),
        (["--shape", "16,256,128,16,x", "--format", "bf16"], "--shape"),
        (["--shape", "16,256,128,16,4"], "--format"),
        (["--shape", "16,256,128,16,4", "--format", "gptq5"], "weight format name"),
        (["--shape", "16,256,128,16,4", "--format", "bf16", "--tokens", "2"], "--tokens"),
        (["--shape", "16,256,128,16,4", "--format", "bf16", "--arch", "h200"], "arch"),
        ([TINY, "--format", "bf16"], "CHECKPOINT"),
        (["nowhere"], "nowhere"),
    ],
)
def test_wrong_use(arguments: list[str], what: str) -> None:
    found = call(*arguments, "--json")
    assert found.exit_code == 2
    assert what in json.loads(found.stdout)["what"]
