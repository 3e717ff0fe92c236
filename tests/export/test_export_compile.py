"""Every exported kernel compiles, fits and leaves operands in flight alone; none but those known spills.

Of all ops with int4 weights in groups of 128 and bf16 activations, on every arch; but for what takes long to compile:
plans in two launches are of one tile, on two archs; the fold is whole on two archs, and one of each kind on the others;
the order of rows is of small chunks. Kernels of other formats are compiled with every config in tests/kernels/grouped;
here with one config each. `fanfold export` itself refuses a kernel that does not fit or whose operands may be
overwritten, and says of each what spills.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from compiling import ALL_ARCHS, compile_exported
from fanfold.export.description import Kernel
from fanfold.export.functions import weights
from fanfold.export.plan import OPS, plan
from fanfold.spec.arch import SHARED_BYTES

BOTH = ("sm_80", "sm_90")
LORA = [op for op in OPS if op.startswith("lora")]
OTHERS = [op for op in OPS if not op.startswith(("grouped", "lora")) and op != "plan_sort_many"]


def exported(arch: str) -> Iterator[Kernel]:
    yield from plan([arch], [*OTHERS, "grouped_int4"], formats=["gptq4-g128"])
    if arch in BOTH:
        for kernel in plan([arch], ["plan_sort_many"]):
            if kernel.choices.get("tile", 64) == 64:
                yield kernel


def folds(arch: str) -> Iterator[Kernel]:
    for kernel in plan([arch], LORA):
        choices = kernel.choices
        if kernel.function.op == "lora_order":
            wanted = choices["chunk"] in (64, 256) and choices["bins"] == 32
        else:
            wanted = arch in BOTH or (choices["tile"], choices["block_r"]) == (16, 32)
        if wanted:
            yield kernel


def check(kernels: Iterator[Kernel], arch: str, known: dict[str, int]) -> int:
    """Fails where a kernel is not sound; the number of kernels."""
    spills: dict[str, int] = {}
    count = 0
    for kernel in kernels:
        resources = compile_exported(kernel)
        assert resources.shared <= SHARED_BYTES[arch], resources
        assert resources.hazards == () or kernel.hazard_test is not None, resources
        if resources.stack:
            spills[kernel.id.removesuffix(f"-{arch}")] = resources.stack
        count += 1
    assert spills == known
    return count


@ALL_ARCHS
def test_every_exported_kernel(arch: str) -> None:
    assert check(exported(arch), arch, {}) >= 60


@ALL_ARCHS
def test_every_fold(arch: str) -> None:
    assert check(folds(arch), arch, {}) >= 15


@pytest.mark.parametrize("op", [op for op in weights.FORMATS if op != "grouped_int4"])
def test_other_formats(op: str) -> None:
    """The smallest tile of down and of gate_up, with the activation and without."""
    kernels = (k for k in plan([90], [op]) if k.choices.get("tile") == 16 and not k.choices.get("aside"))
    assert check(kernels, "sm_90", {}) >= 3
