"""Which kernels are searched for overwritten operands: by the form of their matrix instructions in PTX."""

from __future__ import annotations

import pytest

from fanfold.export.machine_code import takes_registers

PRODUCT = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{%r1,%r2,%r3,%r4}}, {}, %rd8, %p5, 1, 1, 0;"


@pytest.mark.parametrize(
    ("ptx", "found"),
    [
        (PRODUCT.format("{%r5,%r6,%r7,%r8}"), True),
        (PRODUCT.format("%rd7") + "\n\t" + PRODUCT.format("{%r5,%r6,%r7,%r8}"), True),
        (PRODUCT.format("%rd7"), False),
        (PRODUCT.format("%rd7") + "\n\tst.global.v2.b32 [%rd1], {%r5,%r6};", False),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1,%r2}, {%r3,%r4}, {%r5}, {%r1,%r2};", False),
    ],
)
def test_an_operand_from_registers(ptx: str, found: bool) -> None:
    assert takes_registers(ptx) is found
