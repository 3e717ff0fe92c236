"""Damaged and contradictory directories: each refused by class, naming the file or tensor and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoints import CONTAINER, edit_json, parts, shard

from fanfold.errors import (
    ConfigError,
    CorruptFileError,
    FanfoldError,
    MissingExpertsError,
    MissingFileError,
    TensorError,
    UnsupportedError,
)
from fanfold.formats.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
GPTQ = "gptqmodel_qwen3moe_w4_g32"
V2 = "gptqmodel_qwen3moe_w4_g32_v2_asym"
NVFP4 = "modelopt_qwen3moe_nvfp4"
PACKED = "ct_qwen3moe_w4a16_asym"
FP8 = "ct_qwen3moe_fp8_block"
MXFP4 = "native_gptoss_mxfp4"
BASE = "base_qwen3moe_tiny_bf16"
EXPERT = CONTAINER.format(layer=0) + ".3"


def copy(folder: Path, sample: str) -> Path:
    """The files of a sample that make the checkpoint."""
    for name in ("config.json", "model.safetensors", "quantize_config.json", "hf_quant_config.json"):
        if (GOLDEN / sample / name).exists():
            shutil.copy(GOLDEN / sample / name, folder / name)
    return folder


def load(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for layer in checkpoint.layers:
        checkpoint.read_experts(layer)


def refusal(folder: Path, kind: type[FanfoldError]) -> str:
    with pytest.raises(FanfoldError) as caught:
        load(folder)
    assert type(caught.value) is kind, caught.value
    text = parts(caught.value)
    assert str(folder) in text
    return text


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Changes tensors by what their name ends with; a change to None removes it."""
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    for end, change in changes.items():
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = change(tensors[name].clone()) if change else None
    save_file({n: t.contiguous() for n, t in tensors.items() if t is not None}, folder / "model.safetensors")


def edit_quantization(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit_json(folder / "config.json", quantization_config=config["quantization_config"] | fields)


def at(value: float, *place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Puts a value at a place; a byte where the dtype has no such number."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        target = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        target[place] = value
        return tensor

    return change


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return apply


FILES: dict[str, tuple[Callable[[bytes], bytes], type[FanfoldError], str]] = {
    "empty": (lambda b: b"", CorruptFileError, "found 0 bytes; expected a safetensors file"),
    "cut in the length": (lambda b: b[:5], CorruptFileError, "found 5 bytes"),
    "cut in the header": (lambda b: b[:200], CorruptFileError, "in a file of 200; expected a whole safetensors file"),
    "cut in the data": (lambda b: b[:-1], CorruptFileError, "as its header says"),
    "cut behind the header": (
        lambda b: b[: 8 + int.from_bytes(b[:8], "little")],
        CorruptFileError,
        "as its header says",
    ),
    "longer": (lambda b: b + b"\0", CorruptFileError, "as its header says"),
    "zeros": (lambda b: bytes(len(b)), CorruptFileError, "a header that is no JSON"),
    "text": (lambda b: b"version https://git-lfs.github.com/spec/v1\n" * 3, CorruptFileError, "found a header of"),
    "one character of the header": (
        lambda b: b[:9] + b"!" + b[10:],
        CorruptFileError,
        "found a header that is no JSON",
    ),
    "length of the header": (
        lambda b: (2**62).to_bytes(8, "little") + b[8:],
        CorruptFileError,
        "found a header of 46116",
    ),
    "html": (lambda b: b"<html>not found</html>", CorruptFileError, "found a header of"),
}


@pytest.mark.parametrize("fault", FILES)
def test_damaged_weights(tmp_path: Path, fault: str):
    change, kind, text = FILES[fault]
    raw(change)(copy(tmp_path, GPTQ))
    found = refusal(tmp_path, kind)
    assert text in found
    assert f"{tmp_path / 'model.safetensors'}" in found
    assert "Fetch the file again, and compare its size and checksum with the source." in found


@pytest.mark.parametrize("fault", ["cut in the data", "zeros"])
def test_a_damaged_shard_is_named(tmp_path: Path, fault: str):
    shard(copy(tmp_path, GPTQ), 3)
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(FILES[fault][0](file.read_bytes()))
    assert "model-00002-of-00003.safetensors: found" in refusal(tmp_path, CorruptFileError)


def test_missing_shards_and_their_tensors(tmp_path: Path):
    shard(copy(tmp_path, GPTQ), 3)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "found no model-00002-of-00003.safetensors" in refusal(tmp_path, MissingFileError)
    kept = {name: file for name, file in index["weight_map"].items() if "00002" not in file}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))
    with pytest.raises(TensorError):  # MissingExpertsError where a whole projection is gone
        load(tmp_path)


CONFIGS: dict[str, tuple[Callable[[Path], Any], type[FanfoldError], str]] = {
    "missing": (lambda f: f.unlink(), MissingFileError, "config.json: found nothing; expected a JSON file"),
    "not JSON": (lambda f: f.write_text("{'a': 1}"), CorruptFileError, "config.json: found no JSON"),
    "a list": (lambda f: f.write_text("[]"), CorruptFileError, "config.json: found a list; expected a JSON object"),
    "deep": (lambda f: f.write_text('{"a":' * 10**5 + "1" + "}" * 10**5), CorruptFileError, "config.json: found"),
    "deep but read": (lambda f: f.write_text('{"a":' * 200 + "1" + "}" * 200), CorruptFileError, "nested without end"),
    "empty": (lambda f: f.write_bytes(b""), CorruptFileError, "config.json: found no JSON"),
    "binary": (lambda f: f.write_bytes(b"\x80\x81"), CorruptFileError, "config.json: found no JSON"),
    "hidden_size": (lambda f: edit_json(f, hidden_size=256), TensorError, "(H): found 128; expected 256"),
    "num_experts": (lambda f: edit_json(f, num_local_experts=9), MissingExpertsError, "found no 8.gate, 8.up"),
    "fewer experts": (
        lambda f: edit_json(f, num_local_experts=7),
        TensorError,
        "an expert number of 7; expected numbers",
    ),
    "two numbers": (lambda f: edit_json(f, num_experts=4), ConfigError, "num_experts = 4, num_local_experts = 8"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_damaged_configs(tmp_path: Path, fault: str):
    change, kind, text = CONFIGS[fault]
    change(copy(tmp_path, GPTQ) / "config.json")
    assert text in refusal(tmp_path, kind)


QUANTIZATIONS: dict[str, tuple[str, dict[str, Any], type[FanfoldError], str]] = {
    "bits 5": (GPTQ, {"bits": 5}, UnsupportedError, ".bits: found 5; expected 2 or 3 or 4 or 8"),
    "bits text": (GPTQ, {"bits": "4"}, ConfigError, ".bits: found '4'; expected a whole number"),
    "bits float": (GPTQ, {"bits": 4.0}, ConfigError, ".bits: found 4.0; expected a whole number"),
    "bits true": (GPTQ, {"bits": True}, ConfigError, ".bits: found True; expected a whole number"),
    "bits null": (GPTQ, {"bits": None}, ConfigError, ".bits: found None; expected a whole number"),
    "bits of others": (GPTQ, {"bits": 8}, TensorError, "expected shape [2, 64] for gptq8-g32-v1"),
    "group_size 0": (GPTQ, {"group_size": 0}, ConfigError, ".group_size: found 0; expected a positive number, or -1"),
    "group_size -2": (GPTQ, {"group_size": -2}, ConfigError, ".group_size: found -2"),
    "group_size of others": (
        GPTQ,
        {"group_size": 64},
        TensorError,
        "scales: found shape [4, 64]; expected shape [2, 64]",
    ),
    "unknown method": (
        GPTQ,
        {"quant_method": "quip"},
        UnsupportedError,
        ".quant_method: found 'quip'; expected one of",
    ),
    "no method": (GPTQ, {"quant_method": None, "method": None}, ConfigError, ".quant_method: found None"),
    "awq": (
        GPTQ,
        {"quant_method": "awq", "format": None, "checkpoint_format": None},
        TensorError,
        "g_idx: found a tensor",
    ),
    "planar": (GPTQ, {"format": "gptq_p", "checkpoint_format": "gptq_p"}, UnsupportedError, "found 'gptq_p'"),
    "desc_act text": (GPTQ, {"desc_act": "no"}, ConfigError, ".desc_act: found 'no'; expected true or false"),
    "no algorithm": (NVFP4, {"quant_algo": None}, ConfigError, ".quant_algo: found None"),
    "other algorithm": (
        NVFP4,
        {"quant_algo": "FP8"},
        TensorError,
        "weight_scale_2: found a tensor unknown to fp8-tensor",
    ),
    "nothing targeted": (PACKED, {"config_groups": {}}, ConfigError, "expected a plain weight (bf16, fp16 or fp32)"),
    "all ignored": (PACKED, {"ignore": ["Linear"]}, ConfigError, "weight_packed (int32), weight_scale (bfloat16)"),
    "sparse": (PACKED, {"sparsity_config": {"format": "x"}}, UnsupportedError, "sparsity_config.format: found 'x'"),
    "groups text": (PACKED, {"config_groups": "x"}, ConfigError, ".config_groups: found 'x'; expected an object"),
}


@pytest.mark.parametrize("fault", QUANTIZATIONS)
def test_damaged_quantization_configs(tmp_path: Path, fault: str):
    sample, fields, kind, text = QUANTIZATIONS[fault]
    copy(tmp_path, sample)
    for side in ("quantize_config.json", "hf_quant_config.json"):
        (tmp_path / side).unlink(missing_ok=True)
    edit_quantization(tmp_path, **fields)
    assert text in refusal(tmp_path, kind)


def test_files_that_contradict_each_other(tmp_path: Path):
    edit_quantization(copy(tmp_path, GPTQ), bits=8)
    text = refusal(tmp_path, ConfigError)
    assert "config.json: quantization_config.bits: found 8, but" in text
    assert "quantize_config.json says 4; expected one value in both files" in text
    edit_quantization(copy(tmp_path, NVFP4), quant_algo="FP8")
    (tmp_path / "quantize_config.json").unlink()
    text = refusal(tmp_path, ConfigError)
    assert "quantization_config.quant_algo: found 'FP8', but" in text
    assert "hf_quant_config.json: quantization says 'NVFP4'" in text


def test_packed_weights_without_a_quantization_config(tmp_path: Path):
    copy(tmp_path, GPTQ)
    (tmp_path / "quantize_config.json").unlink()
    edit_json(tmp_path / "config.json", quantization_config=None)
    text = refusal(tmp_path, ConfigError)
    assert "experts.0.gate_proj: found g_idx (int32), qweight (int32), qzeros (int32), scales (float16)" in text


def test_plain_weights_with_a_quantization_config(tmp_path: Path):
    copy(tmp_path, BASE)
    for quantization in ({"quant_method": "gptq", "bits": 4, "group_size": 32}, {"quant_method": "fp8"}):
        edit_json(tmp_path / "config.json", quantization_config=quantization)
        text = refusal(tmp_path, ConfigError)
        assert "experts.0.gate_proj: found a plain weight (bf16); expected" in text


TENSORS: dict[str, tuple[str, dict[str, Any], type[FanfoldError], str]] = {
    "NaN scale": (
        GPTQ,
        {f"{EXPERT}.up_proj.scales": at(float("nan"), 1, 5)},
        TensorError,
        "scales: found nan at [1, 5]",
    ),
    "inf scale": (
        PACKED,
        {f"{EXPERT}.up_proj.weight_scale": at(float("inf"), 0, 0)},
        TensorError,
        "found inf at [0, 0]",
    ),
    "global scale 0": (NVFP4, {f"{EXPERT}.up_proj.weight_scale_2": lambda t: t * 0}, TensorError, "found 0.0 at []"),
    "NaN global": (
        NVFP4,
        {f"{EXPERT}.up_proj.weight_scale_2": lambda t: t * float("nan")},
        TensorError,
        "found nan at []",
    ),
    "NaN E4M3 scale": (NVFP4, {f"{EXPERT}.down_proj.weight_scale": at(0x7F, 2, 1)}, TensorError, "found nan at [2, 1]"),
    "NaN E4M3 weight": (
        FP8,
        {f"{EXPERT}.down_proj.weight": at(0xFF, 2, 1)},
        TensorError,
        "weight: found nan at [2, 1]",
    ),
    "NaN block scale": (FP8, {f"{EXPERT}.down_proj.weight_scale": at(float("nan"), 0, 0)}, TensorError, "found nan"),
    "E8M0 255": (MXFP4, {"0.mlp.experts.down_proj_scales": at(255, 1, 2, 0)}, TensorError, "found 255 at [2, 0]"),
    "NaN bias": (
        MXFP4,
        {"down_proj_bias": at(float("nan"), 1, 2)},
        TensorError,
        "found 1 values that are NaN or infinite",
    ),
    "inf weight": (
        BASE,
        {f"{EXPERT}.up_proj.weight": at(float("inf"), 1, 2)},
        TensorError,
        "weight: found inf at [1, 2]",
    ),
    "no zeros": (
        V2,
        {f"{EXPERT}.up_proj.qzeros": None},
        TensorError,
        "qzeros: found no such tensor; expected int32 [4, 8]",
    ),
    "no zeros packed": (
        PACKED,
        {f"{EXPERT}.up_proj.weight_zero_point": None},
        TensorError,
        "weight_zero_point: found no",
    ),
    "an expert": (
        NVFP4,
        {
            f"{EXPERT}.{p}_proj.{s}": None
            for p in ("gate", "up", "down")
            for s in ("weight", "weight_scale", "weight_scale_2", "input_scale")
        },
        MissingExpertsError,
        "found no 3.gate, 3.up; expected gate and up of all 8 experts",
    ),
    "a projection": (
        BASE,
        {f"{EXPERT}.down_proj.weight": None},
        MissingExpertsError,
        "found no 3.down; expected down of",
    ),
    "a scale": (
        NVFP4,
        {f"{EXPERT}.up_proj.weight_scale_2": None},
        TensorError,
        "weight_scale_2): found no such tensor",
    ),
    "shape": (GPTQ, {f"{EXPERT}.up_proj.qweight": lambda t: t[:, :-1]}, TensorError, "expected shape"),
    "shape of words": (
        PACKED,
        {f"{EXPERT}.up_proj.weight_packed": lambda t: t[:, :-1]},
        TensorError,
        "found shape [64, 15]",
    ),
    "dtype": (
        GPTQ,
        {f"{EXPERT}.up_proj.qweight": lambda t: t.to(torch.int64)},
        TensorError,
        "found int64; expected int32",
    ),
    "g_idx": (GPTQ, {f"{EXPERT}.up_proj.g_idx": at(9, 0)}, TensorError, "g_idx: found 9 at [0] (1 such of 128)"),
    "odd size": (
        MXFP4,
        {"0.mlp.experts.gate_up_proj_blocks": lambda t: t[:, 1:]},
        TensorError,
        "found 191 rows of gate",
    ),
}


@pytest.mark.parametrize("fault", TENSORS)
def test_damaged_tensors(tmp_path: Path, fault: str):
    sample, changes, kind, text = TENSORS[fault]
    edit_tensors(copy(tmp_path, sample), **changes)
    found = refusal(tmp_path, kind)
    assert text in found
    assert "model.layers.0.mlp.experts" in found


def test_further_tensors(tmp_path: Path):
    for name, text in (
        (f"{EXPERT}.up_proj.weight_foo", "weight_foo: found a tensor unknown to gptq4-g32-v1"),
        (f"{EXPERT}.up_proj.qweight.extra", "found a tensor among the experts whose name is not known"),
        (
            CONTAINER.format(layer=0) + ".8.up_proj.qweight",
            "experts.8: found an expert number of 8; expected numbers below 8",
        ),
        (CONTAINER.format(layer=0) + ".gate_up_proj", "found the same experts in"),
        (f"{EXPERT}.w3.qweight", "found the same experts in"),
    ):
        tensors = load_file(copy(tmp_path, GPTQ) / "model.safetensors")
        save_file({**tensors, name: torch.zeros(1)}, tmp_path / "model.safetensors")
        assert text in refusal(tmp_path, TensorError)


def test_only_pickled_weights(tmp_path: Path):
    (copy(tmp_path, GPTQ) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "found only pickled weights (pytorch_model.bin)" in refusal(tmp_path, MissingFileError)


def test_an_index_that_leaves_the_directory(tmp_path: Path):
    inside = tmp_path / "inside"
    inside.mkdir()
    copy(tmp_path, GPTQ)
    shutil.copy(tmp_path / "config.json", inside)
    names = load_file(tmp_path / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../model.safetensors")}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refusal(inside, CorruptFileError)
    assert "in '../model.safetensors'; expected tensor names and names of files in this directory" in text


def test_d16_shapes_that_do_not_divide_into_blocks_are_read(tmp_path: Path):
    """64 rows in blocks of 128: not refused, as the last block may be partial."""
    load(copy(tmp_path, FP8))


@pytest.mark.parametrize("sample", [GPTQ, V2, NVFP4, PACKED, FP8, MXFP4, BASE])
def test_the_samples_themselves_are_sound(tmp_path: Path, sample: str):
    load(copy(tmp_path, sample))
