"""load_experts: one layer of a checkpoint, without transformers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import fanfold
from fanfold import Experts, load_experts
from fanfold.errors import (
    ArgumentError,
    CheckpointWarning,
    FanfoldError,
    MissingExpertsError,
    MissingFileError,
    UnavailableError,
)
from fanfold.load import checked_device
from samples import GOLDEN, dense, numbers, random_routing, relative_error, sample

CHECKPOINTS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_sample_has_experts(name: str) -> None:
    for layer in range(2):
        experts = load_experts(sample(name), layer)
        assert isinstance(experts, Experts)
        described = fanfold.inspect(sample(name))["layers"][layer]
        shape = experts.shape
        assert [shape.num_experts, shape.intermediate, shape.hidden] == described["gate_up"]["shape"]
        assert experts.weights.gate_up.format.name == described["gate_up"]["format"]
        assert experts.weights.down.format.name == described["down"]["format"]
        out = experts(numbers(3, shape.hidden), *random_routing(3, 2, shape.num_experts))
        assert bool(torch.isfinite(out).all())
        assert out.std() > 0


@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if (GOLDEN / n / "dequant_layer0_experts01.pt").exists()])
def test_layer_0_runs_as_the_tools_own_dequantised_weights(name: str) -> None:
    experts = load_experts(sample(name), layer=0, dtype=torch.float32, activation_format="plain")
    theirs = torch.load(GOLDEN / name / "dequant_layer0_experts01.pt", weights_only=True)
    x = numbers(5, experts.shape.hidden)

    def w(expert: int, projection: str) -> Tensor:
        key = next(k for k in theirs if f"experts.{expert}.{projection}_proj" in k)
        return theirs[key].double()

    for expert in range(2):
        h = silu(x.double() @ w(expert, "gate").T) * (x.double() @ w(expert, "up").T)
        ids = torch.full((5, 1), expert)
        assert relative_error(experts(x, ids, torch.ones(5, 1)), h @ w(expert, "down").T) <= 1e-6


def test_layers_differ_and_equal_the_models() -> None:
    path = sample("gptq-int4-actorder")
    model = fanfold.load_model(path)
    first, last = (load_experts(path, layer) for layer in (0, 3))
    assert not torch.equal(dense(first.weights)[1], dense(last.weights)[1])
    of_model = model.model.layers[3].mlp.experts
    assert isinstance(of_model, Experts)
    for found, expected in zip(dense(last.weights), dense(of_model.weights), strict=True):
        assert torch.equal(found, expected)
    assert last.path == "model.layers.3.mlp.experts"


def test_transformers_is_not_needed() -> None:
    code = (
        "import sys; import fanfold; fanfold.load_experts(sys.argv[1]);"
        "print(sorted({'transformers', 'typer', 'rich', 'peft'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, sample("gptqmodel_qwen3moe_w4_g32")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout.strip() == "[]", run.stderr


DTYPES: list[tuple[Any, torch.dtype]] = [
    (None, torch.bfloat16),
    ("float16", torch.float16),
    ("torch.float32", torch.float32),
    (torch.float32, torch.float32),
]


@pytest.mark.parametrize(("asked", "found"), DTYPES)
def test_dtype_is_the_configs_or_as_asked(asked: Any, found: torch.dtype) -> None:
    assert load_experts(sample("base_qwen3moe_tiny_bf16"), dtype=asked).dtype == found


@pytest.mark.parametrize(
    ("fields", "found"),
    [({"dtype": "float16"}, torch.float16), ({"torch_dtype": "float32"}, torch.float32), ({}, torch.bfloat16)],
)
def test_dtype_of_older_and_silent_configs(fields: dict[str, str], found: torch.dtype, tmp_path: Path) -> None:
    path = with_config(tmp_path, **{"dtype": None, "torch_dtype": None, **fields})
    assert load_experts(path).dtype == found


def with_config(folder: Path, name: str = "base_qwen3moe_tiny_bf16", **fields: Any) -> Path:
    path = shutil.copytree(sample(name), folder / name)
    config = {**json.loads((path / "config.json").read_text()), **fields}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


def test_a_dtype_of_the_config_that_is_not_run(tmp_path: Path) -> None:
    path = with_config(tmp_path, dtype="float64")
    with pytest.raises(ArgumentError, match=r"config\.json: dtype: found 'float64'; expected one of bfloat16"):
        load_experts(path)
    assert load_experts(path, dtype=torch.bfloat16).dtype == torch.bfloat16


WRONG: dict[str, tuple[dict[str, Any], type[FanfoldError], str]] = {
    "layer": ({"layer": 7}, MissingExpertsError, "layer 7: found experts in layers 0, 1"),
    "dtype": ({"dtype": "int8"}, ArgumentError, "dtype: found 'int8'"),
    "implementation": ({"implementation": "nope"}, ArgumentError, "implementation: found 'nope'"),
    "device": ({"device": "tpu?"}, ArgumentError, "device: found 'tpu"),
    "gpu": ({"device": "cuda:77"}, UnavailableError, "cuda:77"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    options, error, text = WRONG[case]
    with pytest.raises(error, match=text) as caught:
        load_experts(sample("base_qwen3moe_tiny_bf16"), **options)
    assert caught.value.next_step


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        load_experts(tmp_path)


def test_the_implementation_of_a_gpu_is_asked_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert checked_device("cuda", "reference").type == "cuda"
    with pytest.raises(UnavailableError, match="expert layer on sm_75"):
        checked_device("cuda", "auto")
    with pytest.raises(UnavailableError, match="device cuda:1: found 1 CUDA devices"):
        checked_device("cuda:1", "reference")


def test_b1_a_v1_label_on_v2_zeros_warns_with_evidence_and_is_followed(tmp_path: Path) -> None:
    path = shutil.copytree(sample("gptqmodel_qwen3moe_w4_g32_v2_asym"), tmp_path / "relabelled")
    for file in ("config.json", "quantize_config.json"):
        fields = json.loads((path / file).read_text())
        (fields.get("quantization_config") or fields).update(checkpoint_format="gptq", format="gptq")
        (path / file).write_text(json.dumps(fields))
    for load in (load_experts, fanfold.load_model):
        with pytest.warns(CheckpointWarning, match=r"checkpoint_format is gptq, but the \d+ zero points") as caught:
            load(path)
        assert caught[0].filename == __file__  # points at the caller
    with pytest.warns(CheckpointWarning):
        assert load_experts(path).weights.gate_up.format.zero_point == "v1"
