"""Every exported kernel, of all ops, formats, dtypes and archs, is in the record as it is now, fits, and is sound; none
but those known spills.

Compiling them all takes hours: exported.jsonl keeps what it found, under keys that cover source, arguments, arch and
compiler (`export_record`). One of 256 is compiled anew, and must give what is kept.
"""

from __future__ import annotations

from pathlib import Path

from export_record import compiled, kernels_of, key_of, name_of, read, units

from compiling import ALL_ARCHS
from fanfold.export.description import DTYPES
from fanfold.export.plan import ARCHS, OPS, plan
from fanfold.spec.arch import SHARED_BYTES

SPILLS: dict[str, dict[str, int]] = {
    "sm_80": {
        "grouped_int8_gather_gate_up-fp32-gptq8-channel-silu-aside0": 8,
    },
    "sm_86": {
        "grouped_int8_gather_gate_up-fp32-gptq8-channel-silu-aside0": 8,
        "lora_fold-fp32-gate_up-none-source2-tile16-block_r32-one_tile1": 8,
    },
    "sm_89": {
        "grouped_int8_gather_gate_up-fp32-gptq8-channel-silu-aside0": 8,
        "lora_fold-fp32-gate_up-none-source2-tile16-block_r32-one_tile1": 8,
    },
    "sm_90": {
        "grouped_int8_gather_gate_up-fp32-gptq8-channel-silu-aside1": 8,
    },
    "sm_100": {
        "grouped_fp8_down-fp16-fp8-tensor-tile64": 8,
        "grouped_int4_down-fp32-gptq4-g128-asym-v1-tile16": 8,
        "grouped_int4_down-fp32-gptq4-g128-asym-v2-tile16": 8,
        "grouped_int4_gate_up-fp32-gptq4-g128-asym-v1-none-aside0-tile16": 8,
        "grouped_int4_gate_up-fp32-gptq4-g128-asym-v2-none-aside0-tile16": 8,
        "grouped_int4_gate_up-fp32-packed4-g128-asym-silu-aside0-tile16": 16,
        "grouped_int4_gate_up-fp32-packed4-g128-asym-silu-aside1-tile16": 24,
        "grouped_int4_gather_down-fp32-gptq4-g128-asym-v1": 8,
        "grouped_int4_gather_down-fp32-gptq4-g128-asym-v2": 8,
        "grouped_int4_gather_down-fp32-gptq4-g32-asym-v1": 8,
        "grouped_int4_gather_gate_up-fp32-packed4-g128-asym-silu-aside1": 8,
        "grouped_nvfp4_gate_up-fp32-nvfp4-divisor-silu-aside0-tile16": 8,
        "lora_fold-fp32-gate_up-silu-source2-tile16-block_r32-one_tile1": 8,
    },
}
"""Bytes a thread, by arch: all but one with fp32 activations, which use no matrix units. The manifest says so, too."""


@ALL_ARCHS
def test_every_exported_kernel(arch: str) -> None:
    kept = read()
    changed: list[str] = []
    spills: dict[str, int] = {}
    for kernel in (kernel for unit in units(arch) for kernel in kernels_of(unit)):
        row = kept.get(name_of(kernel), {}).get(arch)
        key = key_of(kernel)
        if row is None or row.key != key:
            changed.append(kernel.id)
            continue
        if row.spilled:
            spills[name_of(kernel)] = row.spilled
        assert row.shared <= SHARED_BYTES[arch], f"{kernel.id} takes {row.shared} bytes"
        assert row.overwritten == 0 or kernel.hazard_test is not None, kernel.id
        if key.startswith("00"):
            assert compiled(kernel, key) == row, kernel.id
    assert not changed, f"{len(changed)} have changed, the first is {changed[0]}: make record-exports"
    assert spills == SPILLS.get(arch, {})


def test_the_record_holds_the_plan_and_nothing_else() -> None:
    kept = read()
    found = {(name, arch) for name, rows in kept.items() for arch in rows}
    planned = {(name_of(kernel), arch) for arch in ARCHS for kernel in plan([arch], OPS, DTYPES)}
    assert found == planned
    keys = [row.key for rows in kept.values() for row in rows.values()]
    assert len(set(keys)) == len(keys)  # none is exported twice


def test_the_page_says_what_spills() -> None:
    page = (Path(__file__).parents[2] / "docs/commands/export.md").read_text()
    spilled = [spilled for spills in SPILLS.values() for spilled in spills.values()]
    assert f"{len(spilled)} spill {min(spilled)} to {max(spilled)} bytes a thread" in page
    assert [name for spills in SPILLS.values() for name in spills if "-fp32-" not in name] == [
        "grouped_fp8_down-fp16-fp8-tensor-tile64"
    ]
