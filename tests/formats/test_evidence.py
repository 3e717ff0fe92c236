"""Labels of zero points against the zero points themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_checkpoints import CONTAINER, EXPERTS, config_of, expert_tensors, write
from torch import Tensor

from fanfold.errors import CheckpointWarning
from fanfold.formats import gptq
from fanfold.formats.checkpoint import Checkpoint
from fanfold.formats.codec import dequantize_expert
from fanfold.formats.evidence import zero_point_warning
from fanfold.load import load_experts
from fanfold.spec import WeightFormat

PREFIX = CONTAINER.format(layer=0)
ROOT = Path(__file__).parents[2]
REAL = [
    *sorted((ROOT / "tests" / "golden").glob("gptqmodel_*")),
    ROOT / "tests" / "golden" / "tiny-moe" / "gptq-int4-actorder",
    ROOT / "examples" / "tiny-moe" / "gptq-int4",
    ROOT / "examples" / "tiny-moe" / "nvfp4",
    ROOT / "tests" / "golden" / "native_gptoss_mxfp4",
]


def checkpoint(folder: Path, name: str, label: str | None = None, **changes: Any) -> Checkpoint:
    """A checkpoint whose zeros are of format `name`, labelled otherwise."""
    fmt = WeightFormat.parse(name)
    config = {**(config_of(fmt) or {}), **({"checkpoint_format": label} if label else {}), **changes}
    return Checkpoint(write(folder, expert_tensors(fmt), config))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("stored", "label"), [("v2", "gptq"), ("v1", "gptq_v2")])
def test_a_wrong_label_is_told_with_evidence(tmp_path: Path, bits: int, stored: str, label: str):
    warning = zero_point_warning(centred(tmp_path, bits, stored, label))
    right = {"v1": "gptq", "v2": "gptq_v2"}[stored]
    assert warning is not None
    assert f"{tmp_path}: checkpoint_format is {label}, but the " in warning
    assert "zero points stored for gate and up of layer 0 average " in warning
    assert f"as in {right} files ({label}: about" in warning
    assert f"The label is followed; if the model writes nonsense, set checkpoint_format to {right}" in warning
    assert zero_point_warning(centred(tmp_path, bits, stored, right)) is None


def centred(folder: Path, bits: int, stored: str, label: str) -> Checkpoint:
    """Zeros around the middle of the codes, as weights around 0 give them."""
    fmt = WeightFormat.parse(f"gptq{bits}-g32-asym-{stored}")
    tensors = expert_tensors(fmt)
    low = 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        groups, words = tensors[name].shape
        zeros = low + torch.randint(2, (groups, words * 32 // bits), generator=generator)
        tensors[name] = pack(fmt, zeros)
    config = {**(config_of(fmt) or {}), "checkpoint_format": label}
    return Checkpoint(write(folder, tensors, config))


def pack(fmt: WeightFormat, zeros: Tensor) -> Tensor:
    return gptq.pack_zeros(fmt, zeros.to(torch.int32))


@pytest.mark.parametrize("folder", REAL, ids=lambda path: path.name)
def test_what_tools_wrote_is_labelled_right(folder: Path):
    assert zero_point_warning(Checkpoint(folder)) is None


def test_a_relabelled_file_of_a_tool_is_noticed(tmp_path: Path):
    source = ROOT / "tests" / "golden" / "gptqmodel_qwen3moe_w4_g32_v2_asym"
    tensors = load_file(source / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "num_hidden_layers": 2}
    warning = zero_point_warning(Checkpoint(write(tmp_path, tensors, config, **sizes)))
    assert warning is not None
    assert "checkpoint_format is gptq, but the 4096 zero points" in warning
    assert "set checkpoint_format to gptq_v2" in warning


def test_loading_warns_and_follows_the_label(tmp_path: Path):
    mislabelled = centred(tmp_path, 4, "v2", "gptq")
    with pytest.warns(CheckpointWarning, match="checkpoint_format is gptq, but"):
        experts = load_experts(tmp_path)
    assert experts.weights.gate_up.format.zero_point == "v1"
    found = dequantize_expert(mislabelled.read_experts(0).gate_up, 1, 0)
    right = dequantize_expert(centred(tmp_path, 4, "v2", "gptq_v2").read_experts(0).gate_up, 1, 0)
    scales = expert_tensors(WeightFormat.parse("gptq4-g32-asym-v2"))[f"{PREFIX}.1.gate_proj.scales"]
    expected = right - scales.float().repeat_interleave(32, dim=0).T  # every zero is taken for one more
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("stored", "label"), [("v2", "gptq"), ("v1", "gptq_v2")])
def test_symmetric_files_with_the_other_constant(tmp_path: Path, stored: str, label: str):
    warning = zero_point_warning(checkpoint(tmp_path, f"gptq4-g32-{stored}", label))
    assert warning is not None
    assert f"average {8.0 if stored == 'v2' else 7.0:.2f}" in warning
    assert "It makes no difference here, as these weights are symmetric" in warning


def test_b3_meaningless_zeros_of_symmetric_files_are_no_evidence(tmp_path: Path):
    fmt = WeightFormat.parse("gptq4-g32-v1")
    tensors = expert_tensors(fmt)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("qzeros")]:
        words = torch.randint(-(2**31), 2**31, tuple(tensors[name].shape), generator=generator)
        tensors[name] = words.to(torch.int32)
    assert zero_point_warning(Checkpoint(write(tmp_path, tensors, config_of(fmt)))) is None
    for name in [name for name in tensors if name.endswith("qzeros")]:
        del tensors[name]
    assert zero_point_warning(Checkpoint(write(tmp_path, tensors, config_of(fmt)))) is None


@pytest.mark.parametrize("name", ["awq4-g32-asym", "packed4-g32-asym", "nvfp4", "bf16"])
def test_other_formats_have_no_such_label(tmp_path: Path, name: str):
    fmt = WeightFormat.parse(name)
    assert zero_point_warning(Checkpoint(write(tmp_path, expert_tensors(fmt), config_of(fmt)))) is None


def test_few_zeros_say_nothing(tmp_path: Path):
    fmt = WeightFormat.parse("gptq4-channel-asym-v2")
    names = {"gate_proj": (8, 96), "up_proj": (8, 96), "down_proj": (96, 8)}
    config = {**(config_of(fmt) or {}), "checkpoint_format": "gptq"}
    folder = write(tmp_path, expert_tensors(fmt, names=names), config)
    assert 2 * EXPERTS * 8 < 256
    assert zero_point_warning(Checkpoint(folder)) is None


def test_no_experts(tmp_path: Path):
    folder = write(tmp_path, {"a": torch.zeros(1)}, config_of(WeightFormat.parse("gptq4-g32-v1")))
    assert zero_point_warning(Checkpoint(folder)) is None


def test_down_of_another_width_is_no_evidence_of_gate_and_up(tmp_path: Path):
    four, eight = WeightFormat.parse("gptq4-g32-asym-v1"), WeightFormat.parse("gptq8-g32-asym-v1")
    tensors = {name: t for name, t in expert_tensors(four).items() if "down_proj" not in name}
    tensors |= {name: t for name, t in expert_tensors(eight).items() if "down_proj" in name}
    config = {**(config_of(four) or {}), "dynamic": {"+:.*down_proj": {"bits": 8}}}
    assert zero_point_warning(Checkpoint(write(tmp_path, tensors, config))) is None
