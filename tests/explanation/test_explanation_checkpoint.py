"""explain_checkpoint: a model's layers, those with equal answers together."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest

from fanfold import explain
from fanfold.errors import ConfigError, MissingExpertsError
from fanfold.explanation import checkpoint as room
from fanfold.explanation import explain_checkpoint
from samples import sample


def test_equal_layers_have_one_answer() -> None:
    found = explain_checkpoint(sample("gptq-int4"), 90, 32, 2, 8)
    assert found["model_type"] == "qwen3_moe"
    (answer,) = found["answers"]
    assert answer == {"layers": [0, 1, 2, 3], **explain((16, 256, 128), "gptq4-g128-v1", 90, 128, 4, 2, 8)}


def test_unlike_layers_have_answers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = room.Checkpoint.describe

    def other(self: room.Checkpoint, layer: int) -> object:
        return describe(room.Checkpoint(sample("nvfp4")) if layer == 1 else self, layer)

    monkeypatch.setattr(room.Checkpoint, "describe", other)
    answers = explain_checkpoint(sample("gptq-int4"), "cpu", 1)["answers"]
    assert [(answer["layers"], answer["format"]) for answer in answers] == [
        ([0, 2, 3], "gptq4-g128-v1"),
        ([1], "nvfp4-divisor"),
    ]


def test_the_dtype_is_the_models() -> None:
    """The Hopper product runs NVFP4 with bf16 activations alone."""
    answer = explain_checkpoint(sample("ct_qwen3moe_nvfp4"), 90, 1)["answers"][0]
    assert answer["dtype"] == json.loads((sample("ct_qwen3moe_nvfp4") / "config.json").read_text())["dtype"]


@pytest.mark.parametrize(
    ("name", "arch", "activations", "steps"),
    [
        ("nvfp4", 90, "nvfp4", ["plan", "x to nvfp4", "gate_up", "h to nvfp4", "down", "sum"]),
        ("nvfp4", 89, "nvfp4", ["plan", "x to nvfp4", "gate_up", "h to nvfp4", "down", "sum"]),
        ("ct_qwen3moe_nvfp4a16", 90, "plain", ["plan", "gate_up", "down", "sum"]),
        ("ct_qwen3moe_fp8_dynamic", 90, "plain", ["plan", "gate_up", "down", "sum"]),
    ],
)
def test_activations_are_those_of_the_config(name: str, arch: int, activations: str, steps: list[str]) -> None:
    (answer,) = explain_checkpoint(sample(name), arch, 4)["answers"]
    assert answer["activation_format"] == activations
    assert [step["step"] for step in answer["launches"]] == steps


def test_what_config_json_must_say(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    copytree(sample("gptq-int4"), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in config.items() if name != "num_experts_per_tok"}))
    with pytest.raises(ConfigError, match="no number of experts a token"):
        explain_checkpoint(folder, 90, 1)


def test_a_model_without_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = room.Checkpoint(sample("gptq-int4"))
    checkpoint.layers = {}
    monkeypatch.setattr(room, "Checkpoint", lambda path: checkpoint)
    with pytest.raises(MissingExpertsError, match="no expert layers"):
        explain_checkpoint("model", 90, 1)
