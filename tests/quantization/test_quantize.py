"""quantize: errors as reported, everything else as it was, and how others read the result."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantized import GPT_OSS, MIXTRAL, QWEN, TARGETS, E, H, N, config_of, dense, per_expert, tensors_of, write
from torch import Tensor

import fanfold
from fanfold.formats.checkpoint import Checkpoint
from fanfold.quantization.quantize import quantize
from fanfold.verification import verify
from samples import logits, numbers, relative_error, sample

# What rounding costs normal weights, from below and above.
EXPECTED = {"nvfp4": (0.09, 0.10), "mxfp4": (0.11, 0.12), "int4": (0.09, 0.10), "fp8": (0.02, 0.03)}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("base", [QWEN, MIXTRAL, GPT_OSS])
def test_errors_are_those_of_what_was_written(tmp_path: Path, base: str, name: str) -> None:
    report = quantize(sample(base), tmp_path / "out", name, **TARGETS[name])
    assert [entry["layer"] for entry in report["layers"]] == [0, 1]
    for entry in report["layers"]:
        (gate_up, down), (before, before_down) = (dense(p, entry["layer"]) for p in (tmp_path / "out", sample(base)))
        found = {
            "gate": (gate_up[:, 0], before[:, 0]),
            "up": (gate_up[:, 1], before[:, 1]),
            "down": (down, before_down),
        }
        assert list(entry) == ["layer", *found]
        for projection, (rounded, weight) in found.items():
            errors = entry[projection]
            assert errors["relative_error"] == pytest.approx(relative_error(rounded, weight), rel=1e-5)
            each = [relative_error(r, w) for r, w in zip(rounded, weight, strict=True)]
            assert errors["worst_expert"] == max(range(len(each)), key=each.__getitem__)
            assert errors["worst_relative_error"] == pytest.approx(max(each), rel=1e-5)
            low, high = EXPECTED[name]
            assert low < errors["relative_error"] < high
    shown = fanfold.inspect(tmp_path / "out")
    assert shown["can_run"]
    assert {layer[p]["format"] for layer in shown["layers"] for p in ("gate_up", "down")} == {report["format"]}
    assert {"experts": shown["bytes"]["experts"], "other": shown["bytes"]["other"]}.items() <= report["bytes"].items()
    assert report["bytes"]["experts_before"] == shown["bytes"]["experts_bf16"] + bias_bytes(sample(base))


def bias_bytes(folder: Path) -> int:
    return sum(t.nbytes for n, t in tensors_of(folder).items() if ".experts." in n and n.endswith("_bias"))


@pytest.mark.parametrize(("base", "name"), [(QWEN, "nvfp4"), (MIXTRAL, "mxfp4"), (GPT_OSS, "int4"), (QWEN, "fp8")])
def test_our_model_runs_it_as_dense_weights(tmp_path: Path, base: str, name: str) -> None:
    """Exactly the dequantised weights, and so near the model before."""
    quantize(sample(base), tmp_path / "out", name, **TARGETS[name])
    found = verify(tmp_path / "out")
    assert found["ok"]
    ids = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    before, after = (logits(fanfold.load_model(p, dtype=torch.float32), ids) for p in (sample(base), tmp_path / "out"))
    # by row and in the median: where a router hesitates, rounding may choose another expert
    each = (after - before).norm(dim=-1) / before.norm(dim=-1)
    assert 0.0005 < float(each.median()) < 0.1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("base", "name"), [(QWEN, "int4"), (QWEN, "mxfp4"), (QWEN, "fp8"), (MIXTRAL, "int4")])
def test_transformers_reads_the_same_weights(tmp_path: Path, base: str, name: str, fused: bool) -> None:
    """Not NVFP4: transformers 5.24 leaves out the global scale. Nor gpt-oss: it knows no single experts of that family.

    A source whose experts are in one tensor becomes the family's single experts.
    """
    source = sample(base)
    if fused:
        source = tmp_path / "fused"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(sample(base), dtype=torch.bfloat16)
        model.save_pretrained(source, save_original_format=False)
        assert "model.layers.0.mlp.experts.gate_up_proj" in tensors_of(source)
    quantize(source, tmp_path / "out", name, **TARGETS[name])
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for layer in range(2):
        gate_up, down = dense(tmp_path / "out", layer)
        experts = theirs.model.layers[layer].mlp.experts
        assert torch.equal(experts.gate_up_proj, gate_up.flatten(1, 2).bfloat16())
        assert torch.equal(experts.down_proj, down.bfloat16())
        assert relative_error(gate_up, dense(sample(base), layer)[0]) < 0.12


@pytest.mark.parametrize("base", [QWEN, GPT_OSS])
def test_everything_else_is_copied(tmp_path: Path, base: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(sample(base), source)
    (source / "tokenizer.json").write_text("{}")
    (source / "modeling.py").write_text("x = 1")
    (source / "pytorch_model.bin").write_bytes(b"weights")
    (source / ".cache").write_text("hidden")
    (source / "original").mkdir()
    quantize(source, tmp_path / "out", "mxfp4")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "modeling.py"}
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    others = {name for name in before if ".experts." not in name}
    assert others == {name for name in after if ".experts." not in name}
    assert all(torch.equal(before[name], after[name]) for name in others)


def test_biases_are_taken_apart_as_they_were(tmp_path: Path) -> None:
    """gpt-oss's alternate between gate and up."""
    before = tensors_of(sample(GPT_OSS))
    before |= {n: numbers(*t.shape, seed=len(n)).bfloat16() for n, t in before.items() if n.endswith("proj_bias")}
    config = json.loads((sample(GPT_OSS) / "config.json").read_text())
    quantize(write(tmp_path / "source", before, **config, num_experts=None), tmp_path / "out", "fp8")
    after = tensors_of(tmp_path / "out")
    for layer in range(2):
        container = f"model.layers.{layer}.mlp.experts"
        for e in range(4):
            bias = before[f"{container}.gate_up_proj_bias"][e]
            assert torch.equal(after[f"{container}.{e}.gate_proj.bias"], bias[0::2])
            assert torch.equal(after[f"{container}.{e}.up_proj.bias"], bias[1::2])
            assert torch.equal(after[f"{container}.{e}.down_proj.bias"], before[f"{container}.down_proj_bias"][e])


def test_ignored_are_all_other_linears(tmp_path: Path) -> None:
    quantize(sample(QWEN), tmp_path / "out", "nvfp4")
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    layers = [f"model.layers.{i}.{name}" for i in range(2) for name in ("mlp.gate", *attention)]
    assert sorted(config_of(tmp_path / "out")["ignore"]) == sorted(["lm_head", "model.embed_tokens", *layers])


def test_layers_that_predict_further_tokens_are_left_alone(tmp_path: Path) -> None:
    draft = per_expert("mtp.layers.0.mlp.experts")
    draft["mtp.fc.weight"] = numbers(H, 2 * H).bfloat16()
    source = write(tmp_path / "source", {**per_expert(), **draft})
    quantize(source, tmp_path / "out", "fp8")
    after = tensors_of(tmp_path / "out")
    assert all(torch.equal(after[name], tensor) for name, tensor in draft.items())
    assert config_of(tmp_path / "out")["ignore"] == ["lm_head", r"re:(.*\.)?mtp.*"]
    scheme = Checkpoint(tmp_path / "out").quantization.scheme
    assert scheme("mtp.layers.0.mlp.experts.0.gate_proj") is None
    assert str(scheme("model.layers.0.mlp.experts.0.gate_proj")) == "fp8-channel"


def test_fp16_weights_have_fp16_scales(tmp_path: Path) -> None:
    source = write(tmp_path / "source", per_expert(dtype=torch.float16))
    for name in ("int4", "fp8"):
        quantize(source, tmp_path / name, name, **TARGETS[name])
        scales = [t.dtype for n, t in tensors_of(tmp_path / name).items() if n.endswith("weight_scale")]
        assert scales == [torch.float16] * 3 * E


def fused(names: dict[str, Tensor], container: str) -> dict[str, Tensor]:
    return {f"{container}.{name}": tensor.bfloat16() for name, tensor in names.items()}


CONTAINER = "model.layers.0.mlp.experts"
GATED = {"gate_up_proj": numbers(E, 2 * N, H), "down_proj": numbers(E, H, N, seed=1)}
TURNED = {name: tensor.transpose(1, 2) for name, tensor in GATED.items()}
UNGATED = {"up_proj": numbers(E, N, H), "down_proj": numbers(E, H, N, seed=1)}
HIDDEN = "model.layers.0.feed_forward.experts"
LAYOUTS = {
    "qwen3_moe": (GATED, CONTAINER, ("gate_proj", "up_proj", "down_proj")),
    "mixtral": (GATED, CONTAINER, ("w1", "w3", "w2")),
    "lfm2_moe": (GATED, HIDDEN, ("w1", "w3", "w2")),
    "llama4_text": (TURNED, HIDDEN, ("gate_proj", "up_proj", "down_proj")),
    "nemotron_h": (UNGATED, "model.layers.0.mixer.experts", ("up_proj", "down_proj")),
}


@pytest.mark.parametrize("family", LAYOUTS)
def test_fused_layouts_become_single_experts(tmp_path: Path, family: str) -> None:
    tensors, container, linears = LAYOUTS[family]
    act = {"mlp_hidden_act": "relu2"} if family == "nemotron_h" else {}
    source = write(tmp_path / "source", fused(tensors, container), model_type=family, **act)
    report = quantize(source, tmp_path / "out", "int4", group_size=16)
    names = {name for name in tensors_of(tmp_path / "out") if name.endswith(".weight_packed")}
    assert names == {f"{container}.{e}.{linear}.weight_packed" for e in range(E) for linear in linears}
    for found, expected in zip(dense(tmp_path / "out"), dense(source), strict=True):
        assert found.shape == expected.shape
        assert relative_error(found, expected) < 0.11
    halves = ["up", "down"] if family == "nemotron_h" else ["gate", "up", "down"]
    assert list(report["layers"][0]) == ["layer", *halves]


def test_zeros_cost_nothing(tmp_path: Path) -> None:
    """An expert that was never trained."""
    tensors = per_expert()
    for name in tensors:
        if ".experts.1." in name:
            tensors[name] = torch.zeros_like(tensors[name])
    report = quantize(write(tmp_path / "source", tensors), tmp_path / "out", "nvfp4")
    assert 0.05 < report["layers"][0]["up"]["worst_relative_error"] < 0.12
    assert not dense(tmp_path / "out")[0][1].any()


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.read_experts
    alive: list[int] = []
    known: list[weakref.ref[Any]] = []

    def watched(self: Checkpoint, layer: int) -> Any:
        gc.collect()
        alive.append(sum(reference() is not None for reference in known))
        experts = read(self, layer)
        known.extend(weakref.ref(projection.tensors["weight"]) for projection in (experts.gate_up, experts.down))
        return experts

    monkeypatch.setattr(Checkpoint, "read_experts", watched)
    quantize(sample(QWEN), tmp_path / "out", "fp8")
    assert alive == [0, 0]


def test_progress_counts_experts(tmp_path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    quantize(sample(MIXTRAL), tmp_path / "out", "fp8", progress=lambda *call: calls.append(call))
    assert calls == [(i + 1, 8, f"layer {i // 4}") for i in range(8)]


def test_the_config_keeps_its_fields(tmp_path: Path) -> None:
    source = write(tmp_path / "source", per_expert(), dtype="bfloat16", text_config=None, name="Größe")
    quantize(source, tmp_path / "out", "fp8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == json.loads((source / "config.json").read_text())
