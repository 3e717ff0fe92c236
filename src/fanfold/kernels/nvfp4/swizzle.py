"""Scales in the order of tensor cores and back, all matrices in one launch (see `reference.swizzle`)."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.common.device import arch_of
from fanfold.kernels.nvfp4.reference import GROUP, swizzled_size

BLOCK = 1024
"""Elements of a program."""


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
    # Four groups of a row stay side by side, so they move as one word where every row is one of words.
    whole = plain.shape[2] % 4 == 0 and plain.stride()[:2] == (plain[0].numel(), plain.shape[2])
    if whole and plain.data_ptr() % 4 == atoms.data_ptr() % 4 == 0:
        plain, atoms = plain.view(torch.int32), atoms.view(torch.int32)
    _, n, across = plain.shape
    items = atoms.shape[1] if to_atoms else n * across
    with torch.cuda.device_of(plain):
        move[len(plain), -(-items // BLOCK)](
            plain, atoms, n, across, atoms.shape[1], *plain.stride(),
            TO_ATOMS=to_atoms, SIDE=4 // plain.element_size(), BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit
def place_of(n, g, groups, SIDE: tl.constexpr):
    """Where row n and group g are among the swizzled scales of one matrix, of which SIDE lie side by side."""
    atom = (n // 128) * tl.cdiv(groups, SIDE) + g // SIDE
    return atom * (128 * SIDE) + (n % 32) * (4 * SIDE) + (n % 128) // 32 * SIDE + g % SIDE


@triton.jit
def move(
    plain_ptr: tl.tensor, atoms_ptr: tl.tensor, N: tl.tensor, groups: tl.tensor, size: tl.tensor, stride_e: tl.tensor,
    stride_n: tl.tensor, stride_g: tl.tensor, TO_ATOMS: tl.constexpr, SIDE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK scales (or words of four) of one matrix, in the order in which they are written.

    SIDE: how many elements are four scales: 4 bytes or 1 word, which is a group then.
    """
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    plain = plain_ptr + matrix * stride_e
    atoms = atoms_ptr + matrix * size
    if TO_ATOMS:
        atom = i // (128 * SIDE)
        inside = i % (128 * SIDE)
        across = tl.cdiv(groups, SIDE)
        n = atom // across * 128 + inside // SIDE % 4 * 32 + inside // (4 * SIDE)
        g = atom % across * SIDE + inside % SIDE
        value = tl.load(plain + n * stride_n + g * stride_g, mask=(n < N) & (g < groups) & (i < size), other=0)
        tl.store(atoms + i, value, mask=i < size)
    else:
        n = i // groups
        g = i % groups
        value = tl.load(atoms + place_of(n, g, groups, SIDE), mask=n < N, other=0)
        tl.store(plain + n * stride_n + g * stride_g, value, mask=n < N)
