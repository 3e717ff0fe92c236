"""Every tuned config compiles for Hopper, fits, and leaves operands in flight alone; registers and spills are recorded.

`python tests/kernels/grouped/sm90/test_sm90_compile.py` (with tests and src on PYTHONPATH) writes sm90_resources.json.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from sm90_compiling import compiled, other_kernels, tuned_kernels

from fanfold.spec.arch import SHARED_BYTES
from hazards import hazards, operands

MANIFEST = Path(__file__).with_name("sm90_resources.json")
KERNELS = {kernel.name: kernel for kernel in [*tuned_kernels(), *other_kernels()]}


@pytest.mark.parametrize("name", KERNELS)
def test_fits_and_leaves_operands_in_flight_alone(name: str) -> None:
    """One test a kernel, so that workers share them and each is compiled once."""
    resources, sass = compiled(KERNELS[name])
    assert operands(sass), "weights are not a register operand: the check has nothing to see"
    assert hazards(sass) == []
    assert resources.shared <= SHARED_BYTES["sm_90"]
    assert resources.registers * 32 * 4 * KERNELS[name].config.warpgroups <= 65536
    manifest = json.loads(MANIFEST.read_text())
    if manifest["triton"] == version("triton"):
        assert [resources.registers, resources.shared] == manifest["registers and shared bytes"][name]
        assert resources.stack == manifest["spilled bytes a thread"].get(name, 0)


def test_the_manifest_holds_these_kernels() -> None:
    manifest = json.loads(MANIFEST.read_text())
    assert list(manifest["registers and shared bytes"]) == list(KERNELS)
    assert set(manifest["spilled bytes a thread"]) < set(KERNELS)
    assert max(manifest["spilled bytes a thread"].values()) <= 72


def write_manifest() -> None:
    found = {name: compiled(kernel)[0] for name, kernel in KERNELS.items()}
    manifest = {
        "triton": version("triton"),
        "registers and shared bytes": {name: [r.registers, r.shared] for name, r in found.items()},
        "spilled bytes a thread": {name: r.stack for name, r in found.items() if r.stack},
    }
    MANIFEST.write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    write_manifest()
