"""Targets: the configs and names that llmcompressor writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from quantized import GPT_OSS, MIXTRAL, QWEN, tensors_of

from fanfold.errors import ArgumentError
from fanfold.quantization.quantize import quantize
from fanfold.quantization.target import target_of
from samples import sample

PRESETS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "int4": "W4A16", "fp8": "FP8_DYNAMIC"}
# (target, group size, base, the same by llmcompressor)
WRITTEN = [
    ("nvfp4", None, QWEN, "ct_qwen3moe_nvfp4a16"),
    ("nvfp4", None, MIXTRAL, "ct_mixtral_nvfp4a16"),
    ("int4", 32, GPT_OSS, "ct_gptoss_w4a16"),
    ("fp8", None, QWEN, "ct_qwen3moe_fp8_dynamic"),
]


def kinds(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Experts' tensors: name -> dtype and shape."""
    return {n: (t.dtype, tuple(t.shape)) for n, t in tensors_of(folder).items() if ".experts." in n}


@pytest.mark.parametrize(("name", "group_size", "base", "theirs"), WRITTEN)
def test_config_and_tensors_are_called_as_llmcompressor_calls_them(
    tmp_path: Path, name: str, group_size: int | None, base: str, theirs: str
) -> None:
    quantize(sample(base), tmp_path / "out", name, group_size=group_size)
    ours = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = json.loads((sample(theirs) / "config.json").read_text())["quantization_config"]
    config = ours.pop("quantization_config")
    assert ours == json.loads((sample(base) / "config.json").read_text())
    # There attention is quantised too, so that fewer modules are left alone.
    assert set(expected.pop("ignore")) < set(config.pop("ignore"))
    assert config == expected
    found = kinds(tmp_path / "out")
    for numbered, spelled in {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}.items():
        found = {tensor.replace(numbered, spelled): kind for tensor, kind in found.items()}
    assert found == kinds(sample(theirs))


@pytest.mark.parametrize("name", PRESETS)
def test_compressed_tensors_knows_it_by_its_preset(name: str) -> None:
    config: Any = QuantizationConfig.model_validate(target_of(name).config(["lm_head"]))
    scheme, preset = config.config_groups["group_0"], preset_name_to_scheme(PRESETS[name], ["Linear"])
    assert scheme.format == config.format
    for found, expected in ((scheme.weights, preset.weights), (scheme.input_activations, preset.input_activations)):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            # zp_dtype says nothing of symmetric weights, and observers nothing of a written checkpoint
            beside = {"zp_dtype", "observer", "observer_kwargs"}
            assert found.model_dump(exclude=beside) == expected.model_dump(exclude=beside)


def test_group_sizes_of_int4() -> None:
    assert target_of("int4").format.name == "packed4-g128"
    assert target_of("int4", 64).format.name == "packed4-g64"
    assert target_of("int4", 64).config([])["config_groups"]["group_0"]["weights"]["group_size"] == 64


@pytest.mark.parametrize(
    ("name", "group_size", "found"),
    [("int8", None, "'int8'"), ("int4", 0, "0"), ("int4", -1, "-1"), ("nvfp4", 16, "16, with nvfp4"), ("fp8", 1, "1")],
)
def test_wrong_targets(name: str, group_size: int | None, found: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        target_of(name, group_size)
    assert found in caught.value.found
