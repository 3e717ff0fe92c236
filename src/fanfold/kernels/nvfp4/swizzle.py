"""Scales in the order of tensor cores and back, all matrices in one launch (see `reference.swizzle`)."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.common.device import arch_of
from fanfold.kernels.nvfp4.reference import ATOM_GROUPS, ATOM_ROWS, GROUP, swizzled_size

ATOMS = 32
"""Atoms of a program at most: of K = 2048 rows of 128 bytes, which are read and written whole."""
BLOCK = 1024
"""Bytes of a program where four scales are no word."""


def swizzle(scales: Tensor) -> Tensor:
    """As `reference.swizzle`: [..., N, K/16] of any strides in the last two axes (so also of transposed scales).

    Raises:
        UnavailableError: the scales are where no kernel runs.
    """
    *batch, n, groups = scales.shape
    size = swizzled_size(n, groups * GROUP)
    out = torch.empty((*batch, size), dtype=scales.dtype, device=scales.device)
    source = scales.view(torch.uint8).reshape(math.prod(batch), n, groups)
    _launch(source, out.view(torch.uint8).view(math.prod(batch), size), to_atoms=True)
    return out


def unswizzle(swizzled: Tensor, n: int, k: int) -> Tensor:
    """As `reference.unswizzle`.

    Raises:
        UnavailableError: the scales are where no kernel runs.
    """
    *batch, size = swizzled.shape
    groups = k // GROUP
    out = torch.empty((*batch, n, groups), dtype=swizzled.dtype, device=swizzled.device)
    atoms = swizzled.contiguous().view(torch.uint8).view(math.prod(batch), size)
    _launch(out.view(torch.uint8).view(math.prod(batch), n, groups), atoms, to_atoms=False)
    return out


def _launch(plain: Tensor, atoms: Tensor, to_atoms: bool) -> None:
    arch_of(plain.device)
    if not plain.numel():
        return
    matrices, n, groups = plain.shape
    by_row = plain.stride(2) == 1
    lines = plain if by_row else plain.mT
    # As words of four scales, of one row or of one group, where all lines are whole words.
    whole = lines.stride(2) == 1 and not any(
        size % 4 for size in (lines.shape[2], *lines.stride()[:2], lines.data_ptr(), atoms.data_ptr())
    )
    with torch.cuda.device_of(plain):
        if whole and (by_row or to_atoms):
            words, across = lines.view(torch.int32), -(-groups // ATOM_GROUPS)
            sizes = words.shape[2], *words.stride()[:2]
            vector = math.gcd(4, *sizes)
            block = min(ATOMS, triton.next_power_of_2(across))
            move_atoms[matrices, -(-n // ATOM_ROWS), -(-across // block)](
                words, atoms.view(torch.int32), words.shape[1], *(size // vector for size in sizes),
                TO_ATOMS=to_atoms, BY_ROW=by_row, VECTOR=vector, ATOMS=block, num_warps=max(1, block // 4),
            )  # fmt: skip
        else:
            items = atoms.shape[1] if to_atoms else n * groups
            move_bytes[matrices, -(-items // BLOCK)](
                plain, atoms, n, groups, atoms.shape[1], *plain.stride(), TO_ATOMS=to_atoms, BLOCK=BLOCK
            )


@triton.jit
def across_words(a, b, c, d):
    """Bytes of four words the other way: the first ones of all four, the second ones, ..."""
    ab = a & 0x00FF00FF | (b & 0x00FF00FF) << 8
    cd = c & 0x00FF00FF | (d & 0x00FF00FF) << 8
    ab_odd = (a >> 8) & 0x00FF00FF | b & -16711936  # 0xFF00FF00
    cd_odd = (c >> 8) & 0x00FF00FF | d & -16711936
    first, second = ab & 0xFFFF | cd << 16, ab_odd & 0xFFFF | cd_odd << 16
    third, fourth = (ab >> 16) & 0xFFFF | cd & -65536, (ab_odd >> 16) & 0xFFFF | cd_odd & -65536
    return first, second, third, fourth


@triton.jit
def move_atoms(
    plain_ptr: tl.tensor, atoms_ptr: tl.tensor, lines: tl.tensor, length: tl.tensor, stride_e: tl.tensor,
    stride: tl.tensor, TO_ATOMS: tl.constexpr, BY_ROW: tl.constexpr, VECTOR: tl.constexpr, ATOMS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the words of ATOMS atoms, which lie side by side, of those that hold 128 rows.

    Plain words are four groups of a row (BY_ROW), or four rows of a group (to atoms only); `length` of them in each of
    `lines`, `stride` from line to line, both over VECTOR: so the compiler knows that as many lie side by side. What is
    read in one order is written in another: it goes through shared memory.
    """
    length *= VECTOR
    stride *= VECTOR
    across = length if BY_ROW else tl.cdiv(lines, 4)
    matrix = tl.program_id(0).to(tl.int64)
    down = tl.program_id(1)
    first = tl.program_id(2) * ATOMS
    i = tl.arange(0, 128 * ATOMS)
    to = atoms_ptr + ((matrix * tl.num_programs(1) + down) * across + first) * 128 + i
    inside = i < (across - first) * 128
    plain = plain_ptr + matrix * (stride_e * VECTOR)
    if BY_ROW:
        row = down * 128 + tl.arange(0, 128)[:, None]
        word = first + tl.arange(0, ATOMS)[None, :]
        at = plain + row * stride + word
        there = (row < lines) & (word < length)
        if TO_ATOMS:
            words = tl.reshape(tl.load(at, mask=there, other=0), (4, 32, ATOMS))
            tl.store(to, tl.reshape(tl.permute(words, (2, 1, 0)), (128 * ATOMS,)), mask=inside)
        else:
            words = tl.reshape(tl.load(to, mask=inside, other=0), (ATOMS, 32, 4))
            tl.store(at, tl.reshape(tl.permute(words, (2, 1, 0)), (128, ATOMS)), mask=there)
    else:
        group = (first + tl.arange(0, ATOMS)[:, None]) * 4
        word = down * 32 + tl.arange(0, 32)[None, :]
        at = plain + group * stride + word
        there = word < length
        a = tl.load(at, mask=there & (group < lines), other=0)
        b = tl.load(at + stride, mask=there & (group + 1 < lines), other=0)
        c = tl.load(at + 2 * stride, mask=there & (group + 2 < lines), other=0)
        d = tl.load(at + 3 * stride, mask=there & (group + 3 < lines), other=0)
        a, b, c, d = across_words(a, b, c, d)
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ATOMS, 4, 32))
        tl.store(to, tl.reshape(tl.permute(words, (0, 2, 1)), (128 * ATOMS,)), mask=inside)


@triton.jit
def place_of(n, g, groups):
    """Where row n and group g are among the swizzled scales of one matrix."""
    atom = (n // 128) * tl.cdiv(groups, 4) + g // 4
    return atom * 512 + (n % 32) * 16 + (n % 128) // 32 * 4 + g % 4


@triton.jit
def move_bytes(
    plain_ptr: tl.tensor, atoms_ptr: tl.tensor, N: tl.tensor, groups: tl.tensor, size: tl.tensor, stride_e: tl.tensor,
    stride_n: tl.tensor, stride_g: tl.tensor, TO_ATOMS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK scales of one matrix, in the order in which they are written."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    plain = plain_ptr + matrix * stride_e
    atoms = atoms_ptr + matrix * size
    if TO_ATOMS:
        atom = i // 512
        inside = i % 512
        across = tl.cdiv(groups, 4)
        n = atom // across * 128 + inside // 4 % 4 * 32 + inside // 16
        g = atom % across * 4 + inside % 4
        value = tl.load(plain + n * stride_n + g * stride_g, mask=(n < N) & (g < groups) & (i < size), other=0)
        tl.store(atoms + i, value, mask=i < size)
    else:
        n = i // groups
        g = i % groups
        value = tl.load(atoms + place_of(n, g, groups), mask=n < N, other=0)
        tl.store(plain + n * stride_n + g * stride_g, value, mask=n < N)
