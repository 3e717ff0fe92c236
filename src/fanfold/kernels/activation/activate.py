"""Activations in Triton, where they are not fused behind gate_up: one program a piece of a row."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.common.activations import activate as activate_fp32
from fanfold.spec.activation import Activation

BLOCK = 1024  # values of a program
WARPS = 4


@triton.jit
def activate_kernel(
    y1_ptr: tl.tensor,
    h_ptr: tl.tensor,
    I: tl.tensor,  # noqa: E741
    stride: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK values of row program_id(0); gate lies in the first I columns, up in the second."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < I
    gate = tl.load(y1_ptr + row * stride + column, mask=inside, other=0.0)
    up = gate
    if KIND != "relu2":
        up = tl.load(y1_ptr + row * stride + I + column, mask=inside, other=0.0)
    h = activate_fp32(gate, up, alpha, limit, KIND)
    tl.store(h_ptr + row * I + column, h.to(h_ptr.dtype.element_ty), mask=inside)


def activate(y1: Tensor, activation: Activation) -> Tensor:
    """The input of down from the rounded output of gate_up: `reference.activate` on the GPU.

    Computed in fp32 by the same function as where it is fused behind gate_up. In fp32, h is within 1e-5 of the
    reference's, relatively, by the error of exp (gelu_tanh: or within 2e-6 * |gate * up|, where the reference's
    1 + tanh cancels); in bf16 and fp16 within one unit in the last place. relu2 is equal bit for bit.

    Args:
        y1: [R, 2*I], gate in the first half of the columns and up in the second; [R, I] for relu2.
        activation: which, with its constants.

    Returns:
        [R, I] in y1's dtype.
    """
    rows, columns = y1.shape
    width = columns // 2 if activation.gated else columns
    h = torch.empty((rows, width), dtype=y1.dtype, device=y1.device)
    if h.numel() == 0:
        return h
    if y1.stride(1) != 1:
        y1 = y1.contiguous()
    activate_kernel[(rows, triton.cdiv(width, BLOCK))](
        y1,
        h,
        width,
        y1.stride(0),
        float(activation.alpha),
        float(activation.limit),
        KIND=activation.kind,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return h
