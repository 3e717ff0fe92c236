"""Every config of the tables compiles for every arch, within its shared memory and without spills.

As a message names the case, a test takes all configs of a format; compiled.jsonl lists what each takes.
"""

from __future__ import annotations

import pytest
import torch
from grouped_compiling import FORMATS, W8A8, cases, compiled

from compiling import ALL_ARCHS, ARCHS, check_fits
from fanfold.kernels.grouped.configs import table_of


def check(name: str, arch: str, dtype: torch.dtype = torch.bfloat16, w8a8: bool = False) -> int:
    """Fails where a case of the format doesn't fit, spills, or may be wrong.

    Returns:
        The number of cases.
    """
    found = list(cases(name, arch, dtype, w8a8))
    for case in found:
        resources = compiled(case, arch)
        check_fits(resources, arch)
        # Triton 3.6 may overwrite them while the product reads them.
        assert resources.register_operands == 0, f"weights are a register operand of wgmma: {resources}"
    return len(found)


@pytest.mark.parametrize("name", FORMATS)
@ALL_ARCHS
def test_bf16_activations(arch: str, name: str) -> None:
    assert check(name, arch) >= 8


@pytest.mark.parametrize("name", W8A8)
@ALL_ARCHS
def test_8_bit_activations(arch: str, name: str) -> None:
    assert check(name, arch, w8a8=True) >= 8


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_other_activations(arch: str) -> None:
    for dtype in (torch.float16, torch.float32):
        for name in ("fp16" if dtype == torch.float16 else "fp32", "gptq4-g32-asym-v1"):
            assert check(name, arch, dtype) >= 2


def test_each_config_of_each_machine_is_compiled() -> None:
    for arch in ARCHS:
        table = table_of(int(arch.removeprefix("sm_")))
        found = {
            (case.fused, case.config.block_n, case.config.block_k, case.config.block_t, case.config.num_warps)
            for name in FORMATS
            for case in cases(name, arch)
        }
        for fused, families in ((False, table.alone), (True, table.fused)):
            for family in ("dense", "packed"):
                for config in families[family].values():
                    assert (fused, config.block_n, config.block_k, config.block_t, config.num_warps) in found
