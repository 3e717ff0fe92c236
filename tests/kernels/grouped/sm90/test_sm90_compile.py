"""Kernels for Hopper fit, spill no more than is known, and leave operands in flight alone, without a GPU.

They are all that layers of many sizes get.
"""

from __future__ import annotations

import pytest
import torch
from sm90_compiling import MANY, SPILLS, Kernel, compiled, empty_weights, kernels

from compiling import check_fits, compile_launch
from fanfold.kernels.grouped.sm90.launch import VALUES, _constants
from fanfold.kernels.grouped.sm90.product import grouped_int4_sm90
from fanfold.spec.arch import SHARED_BYTES
from fanfold.spec.work import WorkItems

KERNELS = kernels()
GROUPS = sorted({(kernel.format, kernel.halves) for kernel in KERNELS.values()})
REGISTERS = 65536
"""Of a multiprocessor."""


def check(kernel: Kernel) -> int:
    """Fails where the kernel is not sound.

    Returns:
        Bytes that spill.
    """
    resources = compiled(kernel)
    assert resources.register_operands, f"weights are not a register operand, the check has nothing to see: {resources}"
    assert resources.hazards == (), resources
    assert resources.shared <= SHARED_BYTES["sm_90"], resources
    assert resources.registers * 32 * 4 * kernel.config.warpgroups <= REGISTERS, resources
    return resources.stack


@pytest.mark.parametrize(("name", "halves"), GROUPS)
def test_fits_and_leaves_operands_in_flight_alone(name: str, halves: int) -> None:
    found = [kernel for kernel in KERNELS.values() if (kernel.format, kernel.halves) == (name, halves)]
    spills: dict[str, int] = {}
    for kernel in found:
        bytes_ = check(kernel)
        if bytes_:
            spills[kernel.config.name] = max(bytes_, spills.get(kernel.config.name, 0))
    assert spills == SPILLS.get((name, halves), {})


@pytest.mark.parametrize("k", [512, 2880, 7168, 16384])
def test_the_order_of_act_order_fits(k: int) -> None:
    from fanfold.kernels.grouped.sm90.reorder import reorder_arguments, reorder_kernel

    rows, tile = 16, 64
    x = torch.zeros(rows, k, dtype=torch.bfloat16)
    ids = torch.zeros(rows, dtype=torch.int32)
    single = WorkItems(ids, ids, rows, 1, True, 1)
    planned = WorkItems(ids[:2].long(), torch.zeros(2, tile, dtype=torch.int32), rows, tile, False, 1)
    for case, work in (("single rows", single), ("planned rows", planned)):
        arguments = reorder_arguments(x, torch.zeros(1, k, dtype=torch.int32), x.clone(), work, 8)
        check_fits(compile_launch(reorder_kernel, arguments, "sm_90", f"{case}, {k} inputs", False), "sm_90")


def test_there_are_kernels_of_each_kind() -> None:
    assert len(KERNELS) > 400
    for word in (
        "gate_up",
        "down",
        "aside",
        "expand",
        "single",
        "bias",
        "ordered",
        "fp16",
        "unchained",
        "y1",
        "gelu_tanh",
    ):
        assert any(f" {word}" in name for name in KERNELS), word


def test_a_kept_kernel_gets_its_arguments_in_order() -> None:
    """Later launches pass values and constants by position."""
    weights = empty_weights("gptq4-g128", 2, 64, 512)
    constants = _constants(weights, MANY, False, False, True, "silu", False, False)
    assert [*VALUES, *constants] == grouped_int4_sm90.arg_names
