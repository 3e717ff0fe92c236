"""The weighted sum in Triton: one program a piece of a token's output, slots in order, no atomics."""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.kernels.combine.config import columns


@triton.jit
def combine_kernel(
    y2_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    H: tl.tensor,
    E: tl.tensor,
    stride: tl.tensor,
    stride_part: tl.tensor,
    TOP_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK columns of token program_id(0); PARTS of y2 lie stride_part apart."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    out = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):  # unrolled, so that the loads of all slots are under way together
        row = token * TOP_K + slot
        expert = tl.load(ids_ptr + row)
        here = (expert >= 0) & (expert < E)
        weight = tl.load(weights_ptr + row).to(tl.float32)
        at = y2_ptr + row * stride + column
        y2 = tl.load(at, mask=inside & here, other=0.0).to(tl.float32)
        if PARTS > 1:
            for _ in tl.static_range(1, PARTS):
                at += stride_part
                y2 += tl.load(at, mask=inside & here, other=0.0)
            y2 = y2.to(out_ptr.dtype.element_ty).to(tl.float32)
        out = tl.where(here, out + weight * y2, out)  # a slot of no expert: its weight may be NaN too
    tl.store(out_ptr + token * H + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def combine(
    y2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, dtype: torch.dtype | None = None
) -> Tensor:
    """act( sum over slots, in slot order, of fp32(weight) * fp32(y2) ): `reference.combine` on the GPU, bit for bit.

    Args:
        y2: [T*k, H], row = token*k + slot; or fp32 [parts, T*k, H], sums of down over parts of K, which are added in
            order and rounded first.
        topk_ids: int32 or int64 [T, k]; slots whose id is outside [0, E) add nothing, and y2 is not read there.
        topk_weights: [T, k], bf16, fp16 or fp32.
        num_experts: E.
        dtype: of the result and of the rounding of y2 in parts; None is y2's.

    Returns:
        [T, H].
    """
    tokens, top_k = topk_ids.shape
    hidden = y2.shape[-1]
    parts = y2.shape[0] if y2.dim() == 3 else 1
    out = torch.empty((tokens, hidden), dtype=dtype or y2.dtype, device=y2.device)
    if out.numel() == 0:
        return out
    if y2.stride(-1) != 1:
        y2 = y2.contiguous()
    block = columns(tokens)
    combine_kernel[(tokens, triton.cdiv(hidden, block))](
        y2,
        topk_ids.contiguous(),
        topk_weights.contiguous(),
        out,
        hidden,
        num_experts,
        y2.stride(-2),
        y2.stride(0) if parts > 1 else 0,
        TOP_K=top_k,
        PARTS=parts,
        BLOCK=block,
        num_warps=block // 128,  # 4 values a lane: 8 bytes of 16-bit y2
        enable_fp_fusion=False,  # the product rounds before the sum, as in the reference
    )
    return out
