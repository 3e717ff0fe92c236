"""verify: green on samples, red where something is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fanfold
from fanfold import verification
from fanfold.errors import MissingFileError
from fanfold.layers.experts import Experts
from fanfold.verification import TOLERANCE, relative_error, verify
from samples import sample

SAMPLES: dict[str, tuple[str, ...]] = {
    "gptqmodel_qwen3moe_w4_g32_descact": ("peft_qwen3moe_all_linear", "peft_v4_qwen3moe_per_expert"),
    "ct_qwen3moe_nvfp4": ("peft_qwen3moe_target_parameters",),
    "modelopt_qwen3moe_fp8_pb": (),
    "gptqmodel_mixtral_w4_g32": ("peft_mixtral_v4style_target_modules",),
    "native_gptoss_mxfp4": ("peft_gptoss_target_parameters", "peft018_gptoss_target_parameters"),
    "ct_gptoss_w4a16": ("peft_gptoss_target_parameters",),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_right(name: str) -> None:
    found = verify(sample(name), {f"adapter {i}": sample(it) for i, it in enumerate(SAMPLES[name])})
    assert found["ok"]
    assert found["base_rows_bit_equal"]
    assert found["tolerance"] == TOLERANCE
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    for layer in found["layers"]:
        assert 0 < layer["relative_error"] <= 2e-6
        assert layer["format"] == fanfold.inspect(sample(name))["layers"][0]["gate_up"]["format"]
    assert 0 < found["logits"]["relative_error"] <= 2e-6
    assert 0 < found["logits"]["max_abs_difference"] <= 1e-4


def spoil(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Models are loaded with something changed."""
    load = verification.load_model

    def spoilt(*arguments: Any, **options: Any) -> Any:
        model = load(*arguments, **options)
        change(model)
        return model

    monkeypatch.setattr(verification, "load_model", spoilt)


def test_a_layer_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale of one expert of layer 1, which the router does not choose, is another than in the dense run."""
    forward = Experts.forward

    def wrong(self: Experts, *arguments: Any, **options: Any) -> Tensor:
        scales = self.weights.down.tensors["scales"]
        kept = scales.clone()
        if "layers.1." in self.path:
            scales[3, 0, 0, 0] *= 1.5
        out = forward(self, *arguments, **options)
        scales.copy_(kept)
        return out

    monkeypatch.setattr(Experts, "forward", wrong)
    found = verify(sample("gptqmodel_qwen3moe_w4_g32"))
    assert not found["ok"]
    assert found["layers"][0]["relative_error"] <= TOLERANCE < found["layers"][1]["relative_error"]
    assert found["logits"]["relative_error"] <= TOLERANCE
    assert found["base_rows_bit_equal"]


def test_an_adapter_that_is_not_applied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanfold.layers.reference.lora_fold", lambda *_: None)
    adapters = {"a": sample("peft_qwen3moe_target_parameters")}
    assert not verify(sample("gptqmodel_qwen3moe_w4_g32"), adapters)["ok"]


def test_an_adapter_of_attention_that_is_not_applied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fanfold.layers.linear.lora_fold", lambda *_: None)
    found = verify(sample("gptqmodel_qwen3moe_w4_g32"), {"a": sample("peft_qwen3moe_all_linear")})
    assert not found["ok"]
    assert found["logits"]["relative_error"] > TOLERANCE


def test_a_base_row_that_an_adapter_touches_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as stale ids: every row gets the adapter of the last one."""
    begin = fanfold.lora.Rows.begin

    def stale(self: Any, batch: int, seq: int) -> None:
        begin(self, batch, seq)
        if self.slots:
            self.entries[:batch] = self.slots[-1]

    monkeypatch.setattr("fanfold.lora.rows.Rows.begin", stale)
    found = verify(sample("gptqmodel_qwen3moe_w4_g32"), {"a": sample("peft_qwen3moe_target_parameters")})
    assert found["base_rows_bit_equal"] is False
    assert not found["ok"]


def test_a_base_row_that_differs_by_one_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: Any) -> None:
        """Inside `using`, the last norm has another weight by one bit; its first call takes it back."""
        using, norm = model.adapters.using, model.model.norm
        kept = norm.weight.clone()

        def nudged(names: Any) -> Any:
            norm.weight[0] = torch.nextafter(norm.weight[0], torch.tensor(math.inf))
            return using(names)

        def back(*_: Any) -> None:
            norm.weight.copy_(kept)

        model.adapters.using = nudged
        norm.register_forward_hook(back)

    spoil(monkeypatch, change)
    found = verify(sample("gptqmodel_qwen3moe_w4_g32"))
    assert found["base_rows_bit_equal"] is False
    assert not found["ok"]
    assert found["logits"]["relative_error"] <= TOLERANCE


def test_the_model_is_packed_again_behind_the_dense_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    spoil(monkeypatch, kept.append)
    verify(sample("gptqmodel_qwen3moe_w4_g32"), {"a": sample("peft_qwen3moe_all_linear")})
    (model,) = kept
    assert sum(isinstance(module, Experts) for module in model.modules()) == 2
    fresh = fanfold.load_model(sample("gptqmodel_qwen3moe_w4_g32"), dtype=torch.float32)
    for (name, found), (_, expected) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_progress_ends_at_its_total() -> None:
    calls: list[tuple[int, int, str]] = []
    verify(
        sample("base_mixtral_tiny_bf16"),
        {"a": sample("peft_mixtral_target_parameters")},
        progress=lambda *call: calls.append(call),
    )
    assert calls[-1] == (2, 2, "dense runs")
    assert [what for _, _, what in calls if "dense run of" in what] == ["dense run of the base", "dense run of a"]
    assert all(done <= total for done, total, _ in calls)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        verify(tmp_path)


def test_relative_errors() -> None:
    one, two = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative_error(one, one) == 0.0
    assert relative_error(two, one) == pytest.approx(0.1)
    assert relative_error(torch.tensor([float("nan"), 4.0]), one) == math.inf
    assert relative_error(torch.tensor([float("inf"), 4.0]), one) == math.inf
    assert relative_error(one, torch.zeros(2)) > 1e30
