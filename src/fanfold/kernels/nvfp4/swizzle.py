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

BLOCK = 4096


def swizzle(scales: Tensor) -> Tensor:
    """As `reference.swizzle`: [..., N, K/16] of any strides in the last two axes (so also of transposed scales).

    Raises:
        UnavailableError: the scales are where no kernel runs.
    """
    *batch, n, groups = scales.shape
    size = swizzled_size(n, groups * GROUP)
    out = torch.empty((*batch, size), dtype=scales.dtype, device=scales.device)
    source = scales.view(torch.uint8).reshape(math.prod(batch), n, groups)
    _launch(source, out, size, n, groups, to_atoms=True)
    return out


def unswizzle(swizzled: Tensor, n: int, k: int) -> Tensor:
    """As `reference.unswizzle`.

    Raises:
        UnavailableError: the scales are where no kernel runs.
    """
    *batch, size = swizzled.shape
    groups = k // GROUP
    out = torch.empty((*batch, n, groups), dtype=swizzled.dtype, device=swizzled.device)
    _launch(out.view(torch.uint8).view(math.prod(batch), n, groups), swizzled.contiguous(), size, n, groups, False)
    return out


def _launch(plain: Tensor, atoms: Tensor, size: int, n: int, groups: int, to_atoms: bool) -> None:
    arch_of(plain.device)
    items = size if to_atoms else n * groups
    if len(plain) and items:
        with torch.cuda.device_of(plain):
            move[len(plain), -(-items // BLOCK)](
                plain, atoms.view(torch.uint8), n, groups, size, *plain.stride(), TO_ATOMS=to_atoms, BLOCK=BLOCK
            )


@triton.jit
def place_of(n, g, groups):
    """Byte of row n and group g among the swizzled scales of one matrix."""
    atom = (n // 128) * tl.cdiv(groups, 4) + g // 4
    return atom * 512 + (n % 32) * 16 + (n % 128) // 32 * 4 + g % 4


@triton.jit
def move(
    plain_ptr: tl.tensor, atoms_ptr: tl.tensor, N: tl.tensor, groups: tl.tensor, size: tl.tensor, stride_e: tl.tensor,
    stride_n: tl.tensor, stride_g: tl.tensor, TO_ATOMS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK bytes of one matrix, in the order in which they are written."""
    matrix = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    plain = plain_ptr + matrix * stride_e
    atoms = atoms_ptr + matrix * size
    if TO_ATOMS:
        atom = i // 512
        n = atom // tl.cdiv(groups, 4) * 128 + i % 16 // 4 * 32 + i % 512 // 16
        g = atom % tl.cdiv(groups, 4) * 4 + i % 4
        value = tl.load(plain + n * stride_n + g * stride_g, mask=(n < N) & (g < groups) & (i < size), other=0)
        tl.store(atoms + i, value, mask=i < size)
    else:
        n = i // groups
        g = i % groups
        value = tl.load(atoms + place_of(n, g, groups), mask=n < N, other=0)
        tl.store(plain + n * stride_n + g * stride_g, value, mask=n < N)
