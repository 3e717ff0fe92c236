"""Act-order made fast: inputs re-sorted by group once at load, activations brought into that order at each call.

In an act-ordered file a word of codes mixes groups, so a product must look up a scale (and a zero point) for almost
every weight. Sorted by group it is a file without act-order, whose x is read in another order for each expert.
"""
# pyright: basic, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# (Triton's builtins carry no types.)

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.spec.weights import ProjectionWeights
from fanfold.spec.work import WorkList

ROWS = 4
"""Rows of one program, which reads their expert's order once."""
CODES_ALONG_K = {"gptq": ("qweight", -2), "packed": ("packed", -1)}  # name, axis of K


def sort_by_group(weights: ProjectionWeights) -> tuple[ProjectionWeights, Tensor]:
    """The same weights with the inputs of each expert sorted by group, stably; made where the weights are.

    Args:
        weights: of an act-ordered format.

    Returns:
        Weights of the same format without act-order, which share scales and zero points with the given ones, and the
        order: int32 [E, K], input `order[e, j]` of x belongs to input j of the sorted weights.

    Raises:
        ArgumentError: the format has no act-order, gate and up of an expert differ in order, or a group has more or
            fewer inputs than group_size. Such weights run as they are.
    """
    fmt, k = weights.format, weights.k
    if not fmt.act_order:
        raise ArgumentError(
            "sort_by_group: weights",
            found=str(fmt),
            expected="an act-ordered format",
            next_step="Run the weights as they are: their groups lie in order.",
        )
    g_idx = weights.tensors["g_idx"]
    size = k if fmt.group_size == -1 else fmt.group_size
    by_group = g_idx[:, 0].sort(dim=1, stable=True)
    in_order = torch.arange(k, device=g_idx.device) // size
    if not (bool((g_idx == g_idx[:, :1]).all()) and bool((by_group.values == in_order).all())):
        raise ArgumentError(
            "sort_by_group: g_idx",
            found="other group sizes, or an order of gate that is not that of up",
            expected=f"groups of {size} inputs, one order an expert",
            next_step="Run the weights as they are: the product then looks up the scale of each input.",
        )
    name, axis = CODES_ALONG_K[fmt.kind]
    codes = torch.empty_like(weights.tensors[name])
    for expert in range(weights.num_experts):  # one by one: unpacked codes take 8 / bits of an expert's memory
        for half in range(weights.halves):
            words = weights.tensors[name][expert, half].transpose(axis, -1)
            codes[expert, half] = _sorted_words(words, by_group.indices[expert], fmt.bits).transpose(axis, -1)
    tensors = {key: tensor for key, tensor in weights.tensors.items() if key != "g_idx"}
    fmt = replace(fmt, act_order=False)
    return replace(weights, format=fmt, tensors={**tensors, name: codes}), by_group.indices.int()


def _sorted_words(words: Tensor, order: Tensor, bits: int) -> Tensor:
    """Words int32 [N, W] of codes along K, low bits first, with code j taken from order[j].

    Whole codes lie in one byte, or (3 bits) eight codes in three.
    """
    n, width = words.shape
    chunk = 3 if bits == 3 else 1
    shifts = torch.arange(0, 8 * chunk, bits, device=words.device, dtype=torch.int32)
    chunks = words.contiguous().view(torch.uint8).view(n, -1, chunk).int()
    in_chunk = torch.arange(chunk, device=words.device) * 8
    values = (chunks << in_chunk.int()).sum(-1, dtype=torch.int32)
    codes = ((values[..., None] >> shifts) & ((1 << bits) - 1)).view(n, -1)
    codes[:, : len(order)] = codes[:, order]
    values = (codes.view(n, -1, len(shifts)) << shifts).sum(-1, dtype=torch.int32)
    chunks = (values[..., None] >> in_chunk.int()) & 0xFF
    return chunks.to(torch.uint8).view(n, -1).view(torch.int32).view(n, width)


def permuted(
    op: str,
    x: Tensor,
    order: Tensor,
    experts: int,
    work: WorkList | Tensor,
    sorted_rows: Tensor | None,
    top_k: int | None,
) -> Tensor:
    """x in the order of each row's expert, [R, K] at sorted positions (at rows without a plan), in one launch.

    Args:
        op: the operation, for errors.
        x: [T, K], or [R, K] where top_k is None.
        order: int32 [E, K], as `sort_by_group` gives it.
        experts: E.
        work: tiles, or the expert of each row, [R].
        sorted_rows: int32 [R]; None without a plan.
        top_k: x's row is the token of the position; None: the position.

    Raises:
        ArgumentError: order is not contiguous int32 [E, K] on x's device.
    """
    k = x.shape[1]
    good = list(order.shape) == [experts, k] and order.dtype == torch.int32 and order.is_contiguous()
    if not good or order.device != x.device:
        raise ArgumentError(
            f"{op}: permutation",
            found=f"{order.dtype} {list(order.shape)} on {order.device}".removeprefix("torch."),
            expected=f"contiguous int32 [{experts}, {k}] on {x.device}",
            next_step="Pass the order that sort_by_group made with these weights.",
        )
    planned = isinstance(work, WorkList)
    slots = work.slots if planned else work
    rows = slots.shape[0] if sorted_rows is None else sorted_rows.shape[0]
    out = x.new_empty((rows, k))
    if rows and experts:
        grid = (slots.shape[0], -(-work.tile // ROWS) if planned else 1)
        with torch.cuda.device_of(x):
            permute_rows[grid](
                x, out, order, slots, sorted_rows, experts, k, 1 if top_k is None else top_k, x.stride(0),
                PLANNED=planned, GATHER=top_k is not None, ROWS=ROWS if planned else 1, BLOCK=triton.next_power_of_2(k),
                num_warps=8 if k > 4096 else 4,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["experts", "top_k"])
def permute_rows(
    x_ptr: tl.tensor, y_ptr: tl.tensor, order_ptr: tl.tensor, work_ptr: tl.tensor, rows_ptr: tl.tensor,
    experts: tl.tensor, K: tl.tensor, top_k: tl.tensor, stride_x: tl.tensor,
    PLANNED: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program: up to ROWS rows of a work item, or one row; whole rows, since an input may come from anywhere."""
    slot = tl.program_id(0)
    first = slot
    end = slot + 1
    if PLANNED:
        expert = tl.load(work_ptr + slot * 4).to(tl.int64)
        first = tl.load(work_ptr + slot * 4 + 1)
        end = first + tl.load(work_ptr + slot * 4 + 2)
        first += tl.program_id(1) * ROWS
        end = tl.minimum(end, first + ROWS)
    else:
        expert = tl.load(work_ptr + slot).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    k = tl.arange(0, BLOCK)
    order = tl.load(order_ptr + expert * K + k, mask=k < K, other=0)
    for i in tl.static_range(ROWS):
        position = first + i
        if position < end:
            row = position
            if GATHER:
                row = (tl.load(rows_ptr + position) if PLANNED else position) // top_k
            x = tl.load(x_ptr + row.to(tl.int64) * stride_x + k, mask=k < K, other=0.0)
            tl.store(y_ptr + position.to(tl.int64) * K + k, tl.gather(x, order, 0), mask=k < K)
