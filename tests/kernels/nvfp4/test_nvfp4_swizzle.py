"""Scales in the order of tensor cores: the place of each byte by the formula, and back again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiling import ALL_ARCHS, check_fits, compile_kernel
from fanfold.kernels.nvfp4 import reference, swizzle

SIZES = [(1, 1), (1, 4), (31, 3), (128, 4), (129, 5), (300, 9), (80, 22), (352, 2)]


def scales(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


@pytest.mark.parametrize(("n", "groups"), SIZES)
def test_every_byte_is_where_the_formula_says(n: int, groups: int) -> None:
    plain = scales(n, groups)
    found = reference.swizzle(plain)
    along = -(-groups // 4)
    assert found.numel() == -(-n // 128) * 128 * along * 4 == reference.swizzled_size(n, groups * 16)
    wanted = torch.zeros_like(found)
    for row in range(n):
        for group in range(groups):
            atom = row // 128 * along + group // 4
            wanted[atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4] = plain[row, group]
    assert torch.equal(found, wanted)  # padding is 0


@pytest.mark.parametrize(("n", "groups"), SIZES)
def test_unswizzled_is_what_it_was(n: int, groups: int) -> None:
    plain = scales(3, 2, n, groups)
    both = reference.swizzle(plain)
    assert torch.equal(reference.unswizzle(both, n, groups * 16), plain)
    for expert in range(3):
        assert torch.equal(both[expert, 1], reference.swizzle(plain[expert, 1]))
    floats = plain.view(torch.float8_e4m3fn)
    assert torch.equal(reference.swizzle(floats).view(torch.uint8), both)


@pytest.mark.parametrize(("n", "groups"), [(1, 1), (129, 5), (300, 9), (129, 8), (260, 12)])
def test_the_kernel_in_one_launch_for_all_experts(n: int, groups: int, device: str) -> None:
    plain = scales(3, n, groups).to(device)
    found = swizzle.swizzle(plain)
    assert torch.equal(found.cpu(), reference.swizzle(plain.cpu()))
    assert torch.equal(swizzle.unswizzle(found, n, groups * 16), plain)
    transposed = plain.mT.contiguous()
    assert torch.equal(swizzle.swizzle(transposed.mT), found)
    assert swizzle.swizzle(plain.view(torch.float8_e4m3fn)).dtype == torch.float8_e4m3fn
    assert swizzle.swizzle(plain[:0]).shape == (0, found.shape[1])
    wide = torch.cat([plain, plain], dim=2)
    assert torch.equal(swizzle.swizzle(wide[:, :, :groups]), found)  # rows lie apart
    shifted = torch.cat([plain.flatten()[:1], plain.flatten()])[1:].view(plain.shape)
    assert torch.equal(swizzle.swizzle(shifted), found)  # no word is where words lie


@pytest.mark.parametrize(("n", "groups"), [(4, 4), (132, 6), (260, 132), (64, 72)])
def test_the_kernel_by_words(n: int, groups: int, device: str) -> None:
    """Rows and columns of whole words: several atoms a program, and the last ones not full."""
    plain = scales(2, n, groups).to(device)
    wanted = reference.swizzle(plain.cpu())
    assert torch.equal(swizzle.swizzle(plain).cpu(), wanted)
    assert torch.equal(swizzle.swizzle(plain.mT.contiguous().mT).cpu(), wanted)
    assert torch.equal(swizzle.unswizzle(wanted.to(device), n, groups * 16), plain)
    wide = torch.cat([plain, plain], dim=2)[:, :, groups:]
    assert torch.equal(swizzle.swizzle(wide).cpu(), wanted)  # rows lie apart
    assert torch.equal(swizzle.swizzle(torch.cat([plain, plain], dim=1).mT.contiguous().mT[:, :n]).cpu(), wanted)


@ALL_ARCHS
def test_it_compiles(arch: str) -> None:
    """Words, of rows and of groups, and bytes."""
    for to_atoms, by_row in ((True, True), (False, True), (True, False)):
        types = {"plain_ptr": "*i32", "atoms_ptr": "*i32"}
        types |= dict.fromkeys(("lines", "length", "stride_e", "stride"), "i32")
        constants = {"TO_ATOMS": to_atoms, "BY_ROW": by_row, "VECTOR": 4, "ATOMS": swizzle.ATOMS}
        case = f"{'to' if to_atoms else 'from'} atoms, words of a {'row' if by_row else 'group'}"
        check_fits(compile_kernel(swizzle.move_atoms, types, constants, arch, 8, case), arch)
    for to_atoms in (True, False):
        types = {"plain_ptr": "*u8", "atoms_ptr": "*u8"}
        types |= dict.fromkeys(("N", "groups", "size", "stride_e", "stride_n", "stride_g"), "i32")
        constants = {"TO_ATOMS": to_atoms, "BLOCK": swizzle.BLOCK}
        case = f"{'to' if to_atoms else 'from'} atoms, bytes"
        check_fits(compile_kernel(swizzle.move_bytes, types, constants, arch, 4, case), arch)
