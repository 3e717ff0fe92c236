"""Shards, the folder that appears at once, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized import QWEN, E, H, N, per_expert, tensors_of, write
from safetensors import safe_open
from torch import Tensor

from fanfold.errors import (
    ArgumentError,
    ConfigError,
    FanfoldError,
    MissingExpertsError,
    MissingFileError,
    TensorError,
    UnavailableError,
    UnsupportedError,
)
from fanfold.quantization.quantize import quantize
from fanfold.quantization.shards import Shards
from fanfold.quantization.target import Slot
from samples import numbers, sample

MIXED = {
    "a": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "b": numbers(5, 3),
    "c": torch.tensor(7),
    "d": numbers(4, 4).to(torch.float8_e4m3fn),
    "e": numbers(3, seed=1).bfloat16(),
    "f": torch.empty(0, 4, dtype=torch.float16),
    "g": torch.tensor([True, False, True]),
}


def slots(tensors: dict[str, Tensor]) -> list[Slot]:
    return [Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


@pytest.mark.parametrize(("largest", "files"), [(10**9, 1), (40, 3), (1, 7)])
def test_shards_are_read_by_safetensors(tmp_path: Path, largest: int, files: int) -> None:
    """Whatever order they are written in; odd sizes leave no tensor where it can't be viewed."""
    shards = Shards(tmp_path, slots(MIXED), largest)
    for name in reversed(MIXED):
        shards.write(name, MIXED[name])
    shards.finish()
    assert len(shards.files) == files
    found = tensors_of(tmp_path)
    assert set(found) == set(MIXED)
    for name, tensor in MIXED.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in MIXED.values())
        for name, file in content["weight_map"].items():
            with safe_open(tmp_path / file, "pt") as opened:
                assert name in opened.keys()  # noqa: SIM118 (not iterable)
                assert opened.metadata() == {"format": "pt"}


def test_a_tensor_is_written_once_as_planned(tmp_path: Path) -> None:
    shards = Shards(tmp_path, slots(MIXED))
    with pytest.raises(ArgumentError, match="no such tensor"):
        shards.write("h", MIXED["a"])
    with pytest.raises(ArgumentError, match=r"float32 \[5, 3\]"):
        shards.write("b", MIXED["b"].half())
    shards.write("b", MIXED["b"])
    with pytest.raises(ArgumentError, match="one tensor"):
        shards.write("b", MIXED["b"])
    with pytest.raises(ArgumentError, match="6 tensors that were not written"):
        shards.finish()


def test_many_shards_hold_what_one_does(tmp_path: Path) -> None:
    quantize(sample(QWEN), tmp_path / "one", "int4", group_size=32)
    quantize(sample(QWEN), tmp_path / "many", "int4", group_size=32, shard_bytes=50_000)
    one, many = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")
    assert {path.name for path in (tmp_path / "one").glob("model*")} == {"model.safetensors"}
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 5
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_an_empty_directory_is_taken_and_others_are_not(tmp_path: Path) -> None:
    source = write(tmp_path / "source", per_expert())
    (tmp_path / "empty").mkdir()
    quantize(source, tmp_path / "empty", "fp8")
    assert (tmp_path / "empty" / "model.safetensors").exists()
    assert oct((tmp_path / "empty").stat().st_mode) == oct(source.stat().st_mode)
    before = sorted((tmp_path / "empty").iterdir())
    with pytest.raises(ArgumentError, match="a directory with files in it"):
        quantize(source, tmp_path / "empty", "nvfp4")
    with pytest.raises(ArgumentError, match="a directory with files in it"):
        quantize(source, source, "nvfp4")
    with pytest.raises(ArgumentError, match="found a file"):
        quantize(source, source / "config.json", "nvfp4")
    assert sorted((tmp_path / "empty").iterdir()) == before
    assert quantize(source, tmp_path / "new" / "below", "fp8")["output"].endswith("below")


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), UnavailableError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_nothing_half_written_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    source = write(tmp_path / "source", per_expert())
    write_one = Shards.write
    count = 0

    def failing(self: Shards, name: str, tensor: Tensor) -> None:
        nonlocal count
        count += 1
        if count == 10:
            assert len(list(tmp_path.iterdir())) == 2  # the source, and what is being written
            assert not (tmp_path / "out").exists()
            raise error
        write_one(self, name, tensor)

    monkeypatch.setattr(Shards, "write", failing)
    with pytest.raises(raised) as caught:
        quantize(source, tmp_path / "out", "fp8")
    if isinstance(caught.value, FanfoldError):
        assert "No space left on device" in caught.value.found
    assert count == 10
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def without(name: str) -> dict[str, Tensor]:
    tensors = per_expert()
    del tensors[f"model.layers.0.mlp.experts.{name}"]
    return tensors


def damaged(value: float) -> dict[str, Tensor]:
    tensors = per_expert()
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"][3, 5] = value
    return tensors


GRANITE = {
    "model.layers.0.block_sparse_moe.input_linear.weight": numbers(E, 2 * N, H).bfloat16(),
    "model.layers.0.block_sparse_moe.output_linear.weight": numbers(E, H, N).bfloat16(),
}
REFUSED: dict[str, tuple[Callable[[], dict[str, Tensor]], dict[str, Any], type[FanfoldError], str]] = {
    "missing expert": (lambda: without("1.up_proj.weight"), {}, MissingExpertsError, "no 1.up"),
    "expert beyond": (per_expert, {"num_experts": 4}, MissingExpertsError, "no 3.gate"),
    "nan": (lambda: damaged(float("nan")), {}, TensorError, r"2\.up_proj.*nan at \[3, 5\]"),
    "infinite": (lambda: damaged(float("-inf")), {}, TensorError, r"2\.up_proj.*inf at \[3, 5\]"),
    "fp32": (lambda: per_expert(dtype=torch.float32), {}, UnsupportedError, "found fp32; expected bf16 or fp16"),
    "granite": (lambda: GRANITE, {"model_type": "granitemoe"}, UnsupportedError, "fused experts of granitemoe"),
    "no experts": (lambda: {"model.norm.weight": numbers(H)}, {}, MissingExpertsError, "no experts"),
    "stated": (per_expert, {"quantization_config": {"quant_method": "fp8"}}, UnsupportedError, "quantised by fp8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    tensors, config, error, message = REFUSED[case]
    source = write(tmp_path / "source", tensors(), **config)
    with pytest.raises(error, match=message) as caught:
        quantize(source, tmp_path / "out", "fp8")
    assert str(source) in caught.value.what
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("name", ["ct_qwen3moe_nvfp4a16", "gptqmodel_qwen3moe_w4_g32", "native_gptoss_mxfp4"])
def test_a_quantised_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match="a checkpoint quantised by"):
        quantize(sample(name), tmp_path / "out", "fp8")


def test_packed_weights_without_a_config_are_refused(tmp_path: Path) -> None:
    other = {"model.layers.0.self_attn.q_proj.weight": numbers(H, H).to(torch.float8_e4m3fn)}
    source = write(tmp_path / "source", {**per_expert(), **other})
    with pytest.raises(UnsupportedError, match=r"packed weights in model\.layers\.0\.self_attn\.q_proj"):
        quantize(source, tmp_path / "out", "fp8")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int4", {}, r"gate_up in int4: found K = 64; expected a multiple of 128.*divides 64"),
        ("int4", {"group_size": 64}, r"down in int4: found K = 32; expected a multiple of 64"),
        ("mxfp4", {}, r"down in mxfp4: found K = 48; expected a multiple of 32.*int4"),
        ("nvfp4", {}, r"down in nvfp4: found K = 40; expected a multiple of 16"),
    ],
)
def test_inputs_that_are_no_multiple_of_the_group(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    inner = {"mxfp4": 48, "nvfp4": 40}.get(name, N)
    tensors = per_expert()
    for e in range(E):
        for linear, shape in {"gate_proj": (inner, H), "up_proj": (inner, H), "down_proj": (H, inner)}.items():
            tensors[f"model.layers.0.mlp.experts.{e}.{linear}.weight"] = numbers(*shape).bfloat16()
    with pytest.raises(UnsupportedError, match=message):
        quantize(write(tmp_path / "source", tensors), tmp_path / "out", name, **options)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        quantize(tmp_path / "nowhere", tmp_path / "out", "fp8")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    with pytest.raises((MissingFileError, ConfigError)):
        quantize(tmp_path / "source", tmp_path / "out", "fp8")
