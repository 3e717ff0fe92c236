"""Quotients by the reciprocal are those of division, wherever a code or a scale turns on the last bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.nvfp4.codes import quotient

BETWEEN_CODES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BETWEEN_SCALES = tuple(k / 16 for k in range(16, 32))
"""Points between numbers of four significant bits have five, whatever the exponent."""
ULPS = 6


@triton.jit
def quotients(a_ptr: tl.tensor, b_ptr: tl.tensor, y_ptr: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """y = a / b."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < count, other=1.0)
    b = tl.load(b_ptr + i, mask=i < count, other=1.0)
    tl.store(y_ptr + i, quotient(a, b, tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), b)), mask=i < count)


def check(a: Tensor, b: Tensor) -> None:
    a, b = (each.flatten().contiguous() for each in torch.broadcast_tensors(a, b))
    y = torch.full_like(a, torch.nan)
    quotients[(triton.cdiv(len(a), 4096),)](a, b, y, len(a), BLOCK=4096)
    wrong = (y != a / b).nonzero().flatten().tolist()
    assert not wrong, [(float(a[i]).hex(), float(b[i]).hex()) for i in wrong[:5]]


def near(edges: tuple[float, ...], b: Tensor) -> Tensor:
    """All a within a few ulps of edge * b: [edges, ulps, b]."""
    middle = torch.tensor(edges, device=b.device)[:, None] * b
    ulps = torch.arange(-ULPS, ULPS + 1, dtype=torch.int32, device=b.device)
    return (middle.view(torch.int32)[:, None, :] + ulps[None, :, None]).view(torch.float32)


def from_1_to_2(mantissas: Tensor) -> Tensor:
    return (mantissas.to(torch.int32) + 0x3F800000).view(torch.float32)


def test_of_awkward_divisors(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mantissas = torch.randint(0, 2**23, (2000,), generator=generator)
    ends = torch.tensor([0, 1, 2, 3, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 3, 2**23 - 2, 2**23 - 1])
    b = from_1_to_2(torch.cat([mantissas, ends])).to(device)
    for scale in (1.0, 2.0**-40, 2.0**40):
        for edges in (BETWEEN_CODES, BETWEEN_SCALES):
            check(near(edges, b * scale), b * scale)
    check(b, torch.full_like(b, 6.0))
    scales = torch.arange(8, 16, device=device) / 8  # of E4M3, over a reciprocal
    check(scales[:, None].float(), b[None])


@pytest.mark.gpu
def test_of_all_divisors() -> None:
    """Exponents don't matter as long as all numbers are normal, so this is a proof."""
    for first in range(0, 2**23, 2**18):
        b = from_1_to_2(torch.arange(first, first + 2**18, device="cuda"))
        for edges in (BETWEEN_CODES, BETWEEN_SCALES):
            check(near(edges, b), b)
        check(b, torch.full_like(b, 6.0))
        check((torch.arange(8, 16, device="cuda") / 8)[:, None].float(), b[None])
