"""Numbers on and beside every edge of E2M1 and E4M3."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e4m3_sizes() -> Tensor:
    """All 127 finite sizes of E4M3, from 0 to 448, by their definition."""
    byte = torch.arange(127)
    exponent, mantissa = byte >> 3, (byte & 7).double()
    return torch.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7).double())


def on_and_beside(values: Tensor) -> Tensor:
    """fp32 values, and their neighbours on both sides."""
    values = values.float()
    return torch.cat([values, values.nextafter(torch.tensor(-9e9)), values.nextafter(torch.tensor(9e9))])


def code_edges() -> Tensor:
    """fp32: all sizes of E2M1, the points halfway, 6 and beyond, and their neighbours; both signs and both zeros."""
    sizes = torch.tensor(E2M1)
    edges = on_and_beside(torch.cat([sizes[1:], (sizes[1:] + sizes[:-1]) / 2]))
    return torch.cat([edges, -edges, torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-45, -1e-45])])


def rows_with_scale(values: Tensor, largest: float = 6.0) -> Tensor:
    """Rows of 16: 15 of the values (0 at the end), and `largest`, so that the scale of each row is largest / 6."""
    padded = torch.cat([values, values.new_zeros(-len(values) % 15)]).view(-1, 15)
    return torch.cat([padded, padded.new_full((len(padded), 1), largest)], dim=1)


def rows_of_scales() -> Tensor:
    """Rows of 16 whose amax / 6 is each size of E4M3, each point halfway, or beside them, up to beyond 448."""
    sizes = e4m3_sizes()
    scales = on_and_beside(torch.cat([sizes[1:], (sizes[1:] + sizes[:-1]) / 2, torch.tensor([464.0, 480.0, 1e6])]))
    amax = scales * 6
    fractions = torch.tensor([1.0, -0.5, 0.25, -0.1, 0.0, -0.0, 0.9, 0.7, -1.0, 0.33, 0.6, 0.05, 0.4, -0.2, 0.8, 0.15])
    return amax[:, None] * fractions


def awkward_rows(k: int) -> Tensor:
    """fp32 [9, K] that fp16 holds: wide ranges, whole groups of zeros, -0, tiny numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, k, generator=generator)
    x *= torch.tensor([1, 1000, 1e-3, 0, 1, 1, 3, 0.1, 20.0])[:, None]
    x[4] = -0.0
    x[5, 16:32] = 0
    x[6, :16] *= 1e-4
    return x.half().float()
