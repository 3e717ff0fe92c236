"""Configs of the tables compile, within each arch's shared memory and without spills.

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

from compiling import ARCHS
from fanfold.spec import WeightFormat
from fanfold.spec.arch import SHARED_BYTES
from fanfold.spec.launch import LaunchConfig

MANIFEST = Path(__file__).with_name("grouped_resources.json")
ROUNDED, FP32 = torch.bfloat16, torch.float32
W8A8 = ["fp8-channel", "fp8-block128x128"]
# Bytes that spill (format and 8-bit activations, config): the fastest that were measured all the same. The first makes
# gate and up of 128 outputs and tokens each, with the sums of a step beside theirs.
SPILLS = {
    ("fp8-block128x128", True, "n128-k128-t128-w8-s3-sum-fused"): 40,
    ("fp8-block128x128", False, "n64-k64-t128-w4-s3-fused"): 8,
}
# All configs of these; of the others the one that takes most registers. sm_89 has the least shared memory and converts
# E4M3, sm_80 does not.
WHOLE_TABLES = ("sm_80", "sm_90")


def configs_of(name: str, arch: str, dtype: torch.dtype, w8a8: bool) -> list[tuple[LaunchConfig, bool]]:
    """(config, fused); the larger the tile of rows, the later."""
    from fanfold.kernels.grouped.configs import all_configs

    found = list(all_configs(WeightFormat.parse(name), K, dtype, int(arch.removeprefix("sm_")), w8a8))
    return found if arch in WHOLE_TABLES and (name in FORMATS or w8a8) else found[-1:]


def cases(name: str, arch: str, dtype: torch.dtype, w8a8: bool = False) -> dict[str, list[int]]:
    """Config (and whether it is fused) -> registers and bytes of shared memory and of spills; each is checked."""
    found: dict[str, list[int]] = {}
    for config, fused in configs_of(name, arch, dtype, w8a8):
        resources, sass = compiled(name, config, int(arch.removeprefix("sm_")), dtype, fused, w8a8)
        at = config.name + ("-fused" if fused else "")
        assert resources.shared <= SHARED_BYTES[arch], f"{name} {at}: {resources}"
        assert resources.stack <= SPILLS.get((name, w8a8, at), 0), f"{name} {at} spills: {resources}"
        assert register_operands(sass) == 0, f"{name} {at}: weights are a register operand of wgmma"
        found[at] = [resources.registers, resources.shared, resources.stack]
    return found


def register_operands(sass: str) -> int:
    """[HQ]GMMAs whose left operand lies in registers: Triton 3.6 may overwrite them while the product reads them."""
    return len(re.findall(r"[HQ]GMMA\S*\s+R\d+,\s*R\d+", sass))


def check_manifest(key: str, arch: str, name: str, found: dict[str, list[int]]) -> None:
    manifest = json.loads(MANIFEST.read_text())
    if manifest["triton"] == version("triton"):
        assert found == manifest[key][arch][name]
    else:
        assert list(found) == list(manifest[key][arch][name])


@pytest.mark.parametrize("name", [*FORMATS, *OTHERS])
@pytest.mark.parametrize("arch", ARCHS)
def test_bf16_activations(arch: str, name: str) -> None:
    check_manifest("bf16", arch, name, cases(name, arch, ROUNDED))


@pytest.mark.parametrize("name", W8A8)
@pytest.mark.parametrize("arch", ARCHS)
def test_8_bit_activations(arch: str, name: str) -> None:
    check_manifest("w8a8", arch, name, cases(name, arch, ROUNDED, w8a8=True))


@pytest.mark.parametrize("arch", ARCHS)
def test_fp32_activations(arch: str) -> None:
    for name in ("fp32", "gptq4-g32-asym-v1"):
        assert cases(name, arch, FP32)


@pytest.mark.parametrize("name", ["bf16", "gptq4-g32-asym-v1"])
def test_fp16_activations(name: str) -> None:
    assert cases(name, "sm_90", torch.float16)


def test_register_operands_are_found() -> None:
    assert register_operands("HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;") == 1
    assert register_operands("QGMMA.64x16x32.F32.E4M3.E4M3 R24, R4, gdesc[UR8], R24 ;") == 1
    assert register_operands("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24 ;") == 0


def write_manifest() -> None:
    bf16 = {arch: {name: cases(name, arch, ROUNDED) for name in [*FORMATS, *OTHERS]} for arch in ARCHS}
    w8a8 = {arch: {name: cases(name, arch, ROUNDED, w8a8=True) for name in W8A8} for arch in ARCHS}
    lines = json.dumps({"triton": version("triton"), "bf16": bf16, "w8a8": w8a8}, indent=1)
    MANIFEST.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", lines) + "\n")


if __name__ == "__main__":
    write_manifest()
