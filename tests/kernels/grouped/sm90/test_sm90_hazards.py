"""The check for overwritten operands: it flags a kernel that is wrong, and passes the same one with a full wait."""

from __future__ import annotations

import pytest
import torch
from sm90_bad_kernel import one_operand

from compiling import machine_code
from fanfold.export.hazards import hazards, operands, written


@pytest.mark.parametrize("in_flight", [0, 1])
def test_the_bad_kernel_is_flagged(in_flight: int) -> None:
    """One product in flight while the next weights are loaded to its registers: NaN on the device."""
    x = torch.zeros(64, 64, dtype=torch.bfloat16)
    arguments = dict(x_ptr=x, w_ptr=x, y_ptr=torch.zeros(64, 64), steps=8, IN_FLIGHT=in_flight)
    sass = machine_code(one_operand, arguments, "sm_90")
    assert len(operands(sass)) == 4
    found = hazards(sass)
    assert bool(found) == bool(in_flight)
    assert {hazard.product for hazard in found} <= {operand.address for operand in operands(sass)}
    assert all(hazard.text.startswith("LDG") for hazard in found)


def listing(*lines: str) -> str:
    return "\n".join(f"        /*{16 * n:04x}*/    {line} ;" for n, line in enumerate(lines))


PRODUCT = "HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0"


def test_the_second_turn_of_a_loop_is_followed() -> None:
    turn = ["MOV R7, R1", PRODUCT, "@P0 BRA 0x0", "EXIT"]
    assert [(h.address, h.product) for h in hazards(listing(*turn))] == [(0, 16)]
    assert hazards(listing("MOV R8, R1", *turn[1:])) == []
    assert hazards(listing(*turn[:2], "WARPGROUP.DEPBAR.LE gsb0, 0x0", *turn[2:])) == []
    assert hazards(listing(*turn[:2], "WARPGROUP.DEPBAR.LE gsb0, 0x1", *turn[2:])) != []


def test_every_branch_is_followed() -> None:
    code = [PRODUCT, "@!P1 BRA 0x40", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "BRA 0x50", "MOV R4, R1", "EXIT"]
    assert [h.address for h in hazards(listing(*code))] == [0x40]


def test_register_operands_are_found() -> None:
    halves = "HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24"
    bytes_ = "QGMMA.64x16x32.F32.E4M3.E4M3 R24, R8, gdesc[UR8], R24"
    shared = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24"
    assert operands(listing(halves, bytes_, shared)) == [(0, 4), (16, 8)]


@pytest.mark.parametrize(
    ("text", "registers"),
    [
        ("LDG.E.128 R4, desc[UR10][R6.64]", [4, 5, 6, 7]),
        ("@!P0 LDS.64 R8, [R2+0x10]", [8, 9]),
        ("IMAD.WIDE R2, R3, 0x2, R4", [2, 3]),
        ("LOP3.LUT P0, R5, R1, 0xf, RZ, 0xc0, !PT", [5]),
        ("SHFL.IDX PT, R3, R2, RZ, 0x1f", [3]),
        ("STG.E.128 desc[UR4][R2.64], R8", []),
        ("ISETP.GE.AND P0, PT, R4, R5, PT", []),
        ("R2UR UR4, R4", []),
        ("LOP3.LUT P0, RZ, R4, 0x1, RZ, 0xc0, !PT", []),
        ("EXIT", []),
    ],
)
def test_registers_that_an_instruction_writes(text: str, registers: list[int]) -> None:
    assert list(written(text)) == registers
