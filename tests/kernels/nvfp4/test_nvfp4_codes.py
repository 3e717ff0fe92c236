"""Codes and quotients by the reciprocal are those of division, wherever a code or a scale turns on the last bit."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from nvfp4_cases import e4m3_sizes
from torch import Tensor

from fanfold.kernels.common.device import NATIVE_E4M3, arch_of
from fanfold.kernels.nvfp4.codes import codes_by_inverse, codes_of_short, inverse_of, quotient
from fanfold.kernels.nvfp4.reference import Ties, encode

BETWEEN_CODES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
BETWEEN_SCALES = tuple(k / 16 for k in range(16, 32))
"""Points between numbers of four significant bits have five, whatever the exponent."""
ULPS = 6


@triton.jit
def quotients(
    a_ptr: tl.tensor, b_ptr: tl.tensor, y_ptr: tl.tensor, count: tl.tensor, NATIVE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """y = a / b."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < count, other=1.0)
    b = tl.load(b_ptr + i, mask=i < count, other=1.0)
    high, low = inverse_of(b, NATIVE)
    tl.store(y_ptr + i, quotient(a, b, high + low), mask=i < count)


@triton.jit
def encoded(
    a_ptr: tl.tensor, b_ptr: tl.tensor, y_ptr: tl.tensor, count: tl.tensor,
    TO_EVEN: tl.constexpr, SHORT: tl.constexpr, FEW: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """y = code of a / b. SHORT: a has few bits; FEW: b has as well."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < count, other=1.0).to(tl.int32, bitcast=True)[:, None]
    b = tl.load(b_ptr + i, mask=i < count, other=1.0)
    if FEW:
        codes = codes_of_short(a, b, 8388608.0, NATIVE)
    else:
        codes = codes_by_inverse(a, b, TO_EVEN, SHORT, 8388608.0, NATIVE)
    tl.store(y_ptr + i, tl.reshape(codes, (BLOCK,)).to(tl.uint8), mask=i < count)


def pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    one, other = torch.broadcast_tensors(a, b)
    return one.flatten().contiguous(), other.flatten().contiguous()


def check(a: Tensor, b: Tensor) -> None:
    """Quotients."""
    a, b = pairs(a, b)
    y = torch.full_like(a, torch.nan)
    native = arch_of(a.device) >= NATIVE_E4M3
    quotients[(triton.cdiv(len(a), 4096),)](a, b, y, len(a), NATIVE=native, BLOCK=4096)
    report(y != a / b, a, b)


def check_codes(a: Tensor, b: Tensor, ties: Ties, short: bool, few: bool = False) -> None:
    a, b = pairs(a, b)
    y = torch.full_like(a, 9, dtype=torch.uint8)
    native = arch_of(a.device) >= NATIVE_E4M3
    encoded[(triton.cdiv(len(a), 1024),)](
        a, b, y, len(a), TO_EVEN=ties == "even", SHORT=short, FEW=few, NATIVE=native, BLOCK=1024
    )
    report(y != encode(a / b, ties), a, b)


def report(wrong: Tensor, a: Tensor, b: Tensor) -> None:
    at = wrong.nonzero().flatten().tolist()
    assert not at, [(float(a[i]).hex(), float(b[i]).hex()) for i in at[:5]]


def beside(middle: Tensor, ulps: int = ULPS) -> Tensor:
    """All numbers within a few ulps: [ulps, ...]."""
    steps = torch.arange(-ulps, ulps + 1, dtype=torch.int32, device=middle.device)
    return (middle.view(torch.int32) + steps.view(-1, *[1] * middle.dim())).view(torch.float32)


def near(edges: tuple[float, ...], b: Tensor) -> Tensor:
    """All a within a few ulps of edge * b: [ulps, edges, b]."""
    return beside(torch.tensor(edges, device=b.device)[:, None] * b)


def from_1_to_2(mantissas: Tensor) -> Tensor:
    return (mantissas.to(torch.int32) + 0x3F800000).view(torch.float32)


def awkward_divisors() -> Tensor:
    mantissas = torch.randint(0, 2**23, (2000,), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 1, 2, 3, 2**22 - 1, 2**22, 2**22 + 1, 2**23 - 3, 2**23 - 2, 2**23 - 1])
    return from_1_to_2(torch.cat([mantissas, ends]))


def test_quotients_of_awkward_divisors(device: str) -> None:
    b = awkward_divisors().to(device)
    for scale in (1.0, 2.0**-40, 2.0**40):
        for edges in (BETWEEN_CODES, BETWEEN_SCALES):
            check(near(edges, b * scale), b * scale)
    check(b, torch.full_like(b, 6.0))
    check(torch.ones_like(b), b)
    scales = torch.arange(8, 16, device=device) / 8  # of E4M3, over a reciprocal
    check(scales[:, None].float(), b[None])


@pytest.mark.parametrize("ties", ["even", "zero"])
def test_codes_of_sizes_of_11_bits_by_any_step(ties: Ties, device: str) -> None:
    """All steps that bring one such size within 4 ulps of a point between two codes: with others no bit is the last."""
    sizes = from_1_to_2(torch.arange(0, 2**23, 2**13)).to(device)
    steps = beside(sizes / torch.tensor(BETWEEN_CODES, device=device)[:, None], 4)
    check_codes(sizes, steps, ties, short=True)
    check_codes(sizes * 2.0**-40, steps * 2.0**-40, ties, short=True)


@pytest.mark.parametrize("few", [False, True])
def test_codes_of_sizes_of_11_bits_by_scales(few: bool, device: str) -> None:
    """All scales of E4M3, and all sizes beside points between codes."""
    scales = e4m3_sizes()[1:].float().to(device)
    middle = (torch.tensor(BETWEEN_CODES, device=device)[:, None] * scales).view(torch.int32)
    sizes = (middle + (torch.arange(-2, 3, device=device, dtype=torch.int32) * 2**13)[:, None, None]).view(
        torch.float32
    )
    check_codes(sizes, scales, "zero", short=True, few=few)
    if not few:
        check_codes(sizes, scales, "even", short=True)


@pytest.mark.parametrize("ties", ["even", "zero"])
def test_codes_of_any_size(ties: Ties, device: str) -> None:
    b = awkward_divisors()[-300:].to(device)
    check_codes(near(BETWEEN_CODES, b), b, ties, short=False)
    check_codes(
        torch.tensor([0.0, 1e-30, 6.0, 7.9, 8.1, 1e20, torch.inf], device=device)[:, None] * b, b, ties, short=False
    )
    check_codes(torch.tensor([0.0, 2.0**-90, 8.0, 1e20, torch.inf], device=device)[:, None], b, ties, short=True)


@pytest.mark.gpu
def test_of_all_divisors() -> None:
    """Exponents don't matter as long as all numbers are normal, so this is a proof."""
    for first in range(0, 2**23, 2**18):
        b = from_1_to_2(torch.arange(first, first + 2**18, device="cuda"))
        for edges in (BETWEEN_CODES, BETWEEN_SCALES):
            check(near(edges, b), b)
        check(b, torch.full_like(b, 6.0))
        check(torch.ones_like(b), b)
        check((torch.arange(8, 16, device="cuda") / 8)[:, None].float(), b[None])
