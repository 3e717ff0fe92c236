"""Every tuned config compiles for Hopper, fits, and leaves operands in flight alone; registers and spills are recorded.

`python tests/kernels/grouped/sm90/test_sm90_compile.py` (with tests and src on PYTHONPATH) writes sm90_resources.json.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from sm90_compiling import compiled, other_kernels, tuned_kernels

from compiling import Resources
from fanfold.spec.arch import SHARED_BYTES
from hazards import Hazard, hazards, operands

MANIFEST = Path(__file__).with_name("sm90_resources.json")
KERNELS = {kernel.name: kernel for kernel in [*tuned_kernels(), *other_kernels()]}
Found = dict[str, tuple[Resources, int, list[Hazard]]]  # what it takes, its register operands, hazards


def compile_all() -> Found:
    found: Found = {}
    for name, kernel in KERNELS.items():
        resources, sass = compiled(kernel)
        found[name] = (resources, len(operands(sass)), hazards(sass))
    return found


def manifest_of(found: Found) -> dict[str, object]:
    """Registers and shared bytes of each kernel, and bytes of stack of those that spill."""
    return {
        "triton": version("triton"),
        "registers and shared bytes": {n: [r.registers, r.shared] for n, (r, _, _) in found.items()},
        "spilled bytes a thread": {n: r.stack for n, (r, _, _) in found.items() if r.stack},
    }


@pytest.fixture(scope="module")
def found() -> Found:
    return compile_all()


@pytest.mark.parametrize("name", KERNELS)
def test_weights_in_flight_are_not_overwritten(name: str, found: Found) -> None:
    _, number, hazard = found[name]
    assert number > 0, "weights are not a register operand: the check has nothing to see"
    assert hazard == []


@pytest.mark.parametrize("name", KERNELS)
def test_fits(name: str, found: Found) -> None:
    resources, _, _ = found[name]
    assert resources.shared <= SHARED_BYTES["sm_90"]
    assert resources.registers * 32 * 4 * KERNELS[name].config.warpgroups <= 65536


def test_registers_and_spills_are_those_of_the_manifest(found: Found) -> None:
    recorded = json.loads(MANIFEST.read_text())
    if recorded["triton"] == version("triton"):
        assert manifest_of(found) == recorded
    else:
        assert list(found) == list(recorded["registers and shared bytes"])


if __name__ == "__main__":
    MANIFEST.write_text(json.dumps(manifest_of(compile_all()), indent=1) + "\n")
