"""A product whose rows do not depend on how many rows there are, nor on where they lie."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ROWS = 16
"""Rows of every product. Products of other sizes sum in other orders, so all of them have this one."""

# Seen with MKL: for few outputs, a row that does not start on a boundary of 64 bytes sums in another order.
_ALIGN = 16  # fp32 values of 64 bytes


def invariant_matmul(x: Tensor, w: Tensor) -> Tensor:
    """The product x . W^T in fixed blocks of rows; what is short of a block is padded with zeros.

    Args:
        x: fp32 [R, K].
        w: fp32 [N, K].

    Returns:
        fp32 [R, N]; a row of it has the same bits whatever the other rows are, and wherever it lies in x.
    """
    rows, outputs = x.shape[0], w.shape[0]
    w = _aligned(w)
    y = x.new_empty(rows, outputs)
    for start in range(0, rows, BLOCK_ROWS):
        part = x[start : start + BLOCK_ROWS]
        block = _padded(part, BLOCK_ROWS, w.shape[1])
        y[start : start + BLOCK_ROWS] = torch.mm(block, w.T)[: len(part), :outputs]
    return y


def _aligned(w: Tensor) -> Tensor:
    rows, columns = (-(-size // _ALIGN) * _ALIGN for size in w.shape)
    fits = w.shape == (rows, columns) and w.is_contiguous() and w.data_ptr() % (4 * _ALIGN) == 0
    return w if fits else _padded(w, rows, columns)


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    padded = x.new_zeros(rows, columns)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded
