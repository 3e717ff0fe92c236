"""Every config of the tables compiles for every arch, without spills and within its shared memory.

`python tests/kernels/grouped/test_grouped_compile.py` (with tests and src on PYTHONPATH) writes grouped_resources.json.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from grouped_compiling import FORMATS, OTHERS, K, compiled

from compiling import ALL_ARCHS, ARCHS, check_fits
from fanfold.spec import WeightFormat

MANIFEST = Path(__file__).with_name("grouped_resources.json")
ROUNDED, FP32 = torch.bfloat16, torch.float32


def cases(name: str, arch: str, dtype: torch.dtype) -> dict[str, list[int]]:
    """Config (and whether it is fused) -> registers and bytes of shared memory; each is checked."""
    from fanfold.kernels.grouped.configs import all_configs

    number = int(arch.removeprefix("sm_"))
    found: dict[str, list[int]] = {}
    for config, fused in all_configs(WeightFormat.parse(name), K, dtype, number):
        resources, sass = compiled(name, config, number, dtype, fused)
        check_fits(resources, arch)
        assert register_operands(sass) == 0, f"{name} {config}: weights are a register operand of wgmma"
        found[config.name + ("-fused" if fused else "")] = [resources.registers, resources.shared]
    return found


def register_operands(sass: str) -> int:
    """HGMMAs whose left operand lies in registers: Triton 3.6 may overwrite them while the product reads them."""
    return len(re.findall(r"HGMMA\S*\s+R\d+,\s*R\d+", sass))


def names_of(arch: str) -> list[str]:
    """All formats on sm_90; elsewhere one of each way to read weights, as a config takes a second to compile."""
    return [*FORMATS, *OTHERS] if arch == "sm_90" else FORMATS


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch in ARCHS for name in names_of(arch)])
def test_every_config_fits(arch: str, name: str) -> None:
    manifest = json.loads(MANIFEST.read_text())
    found = cases(name, arch, ROUNDED)
    if manifest["triton"] == version("triton"):
        assert found == manifest["bf16"][arch][name]
    else:
        assert list(found) == list(manifest["bf16"][arch][name])


@ALL_ARCHS
def test_fp32_activations(arch: str) -> None:
    for name in ("fp32", "gptq4-g32-asym-v1"):
        assert cases(name, arch, FP32)


@pytest.mark.parametrize("name", FORMATS)
def test_fp16_activations(name: str) -> None:
    assert cases(name, "sm_90", torch.float16)


def test_register_operands_are_found() -> None:
    assert register_operands("HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;") == 1
    assert register_operands("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24 ;") == 0


def write_manifest() -> None:
    bf16 = {arch: {name: cases(name, arch, ROUNDED) for name in names_of(arch)} for arch in ARCHS}
    MANIFEST.write_text(json.dumps({"triton": version("triton"), "bf16": bf16}, indent=1) + "\n")


if __name__ == "__main__":
    write_manifest()
