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
# Bytes that may spill, by config: the fastest that were measured all the same. They make gate and up for 128 tokens;
# those of 8-bit activations hold the sums of a step beside the sums.
SPILLS = {
    "n128-k128-t128-w8-s3-sum-fused": 152,
    "n128-k128-t128-w8-s3-fused": 152,
    "n64-k64-t128-w4-s3-fused": 32,
}
# As a config takes seconds to compile, the tests compile all of these on sm_90 and, of the others, the one that takes
# most registers; formats that differ from others in single functions on two archs. The manifest holds more.
WHOLE_TABLES = ["bf16", "gptq4-g32-asym-v1", "fp8-block128x128 w8a8"]
ALL_FORMATS = ("sm_80", "sm_90")


def configs_of(name: str, arch: str, dtype: torch.dtype, w8a8: bool) -> list[tuple[LaunchConfig, bool]]:
    """(config, fused); the larger the tile of rows, the later."""
    from fanfold.kernels.grouped.configs import all_configs

    found = list(all_configs(WeightFormat.parse(name), K, dtype, int(arch.removeprefix("sm_")), w8a8))
    whole = arch == "sm_90" and dtype == ROUNDED and (f"{name} w8a8" if w8a8 else name) in WHOLE_TABLES
    return found if whole else found[-1:]


def cases(name: str, arch: str, dtype: torch.dtype, w8a8: bool = False) -> dict[str, list[int]]:
    """Config (and whether it is fused) -> registers and bytes of shared memory and of spills; each is checked."""
    found: dict[str, list[int]] = {}
    for config, fused in configs_of(name, arch, dtype, w8a8):
        resources = compiled(name, config, int(arch.removeprefix("sm_")), dtype, fused, w8a8)
        at = config.name + ("-fused" if fused else "")
        assert resources.shared <= SHARED_BYTES[arch], f"{name} {at}: {resources}"
        assert resources.stack <= SPILLS.get(at, 0), f"{name} {at} spills: {resources}"
        # Triton 3.6 may overwrite them while the product reads them.
        assert resources.register_operands == 0, f"{name} {at}: weights are a register operand of wgmma"
        found[at] = [resources.registers, resources.shared, resources.stack]
    return found


def check_manifest(key: str, arch: str, name: str, found: dict[str, list[int]]) -> None:
    manifest = json.loads(MANIFEST.read_text())
    if manifest["triton"] == version("triton"):
        assert found.items() <= manifest[key][arch][name].items()
    else:
        assert set(found) <= set(manifest[key][arch][name])


@pytest.mark.parametrize(
    ("arch", "name"),
    [(arch, name) for arch in ARCHS for name in (FORMATS + OTHERS if arch in ALL_FORMATS else FORMATS)],
)
def test_bf16_activations(arch: str, name: str) -> None:
    check_manifest("bf16", arch, name, cases(name, arch, ROUNDED))


@pytest.mark.parametrize("name", W8A8)
@pytest.mark.parametrize("arch", ARCHS)
def test_8_bit_activations(arch: str, name: str) -> None:
    check_manifest("w8a8", arch, name, cases(name, arch, ROUNDED, w8a8=True))


@pytest.mark.parametrize("arch", ALL_FORMATS)
def test_fp32_activations(arch: str) -> None:
    for name in ("fp32", "gptq4-g32-asym-v1"):
        assert cases(name, arch, FP32)


@pytest.mark.parametrize("name", ["bf16", "gptq4-g32-asym-v1"])
def test_fp16_activations(name: str) -> None:
    assert cases(name, "sm_90", torch.float16)


def write_manifest() -> None:
    """Whole tables of one of each way to read weights on sm_90; else as the tests."""
    WHOLE_TABLES.extend(FORMATS + [f"{name} w8a8" for name in W8A8])
    bf16 = {arch: {name: cases(name, arch, ROUNDED) for name in FORMATS + OTHERS} for arch in ARCHS}
    w8a8 = {arch: {name: cases(name, arch, ROUNDED, w8a8=True) for name in W8A8} for arch in ARCHS}
    lines = json.dumps({"triton": version("triton"), "bf16": bf16, "w8a8": w8a8}, indent=1)
    MANIFEST.write_text(re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", lines) + "\n")


if __name__ == "__main__":
    write_manifest()
