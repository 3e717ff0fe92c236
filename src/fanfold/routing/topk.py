"""Top-k of a router's logits, in Triton: one program a token."""
# pyright: basic, reportCallIssue=false
# (Triton's builtins carry no types.)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.routing.sizes import power_of_two
from fanfold.spec.router import SCORINGS, Router

LOWEST = tl.constexpr(-(2**63) + 1)  # below the key of every value, -inf included
SOFTMAX = tl.constexpr(SCORINGS.index("softmax"))
SIGMOID = tl.constexpr(SCORINGS.index("sigmoid"))


@triton.jit
def _key(value: tl.tensor, index: tl.tensor) -> tl.tensor:
    """One int64 that orders by value, then by lowest index; a NaN counts as -inf, -0 as 0."""
    value = tl.where(value != value, float("-inf"), value)
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # fp32 order as integer order
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def route_topk_kernel(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    stride: tl.tensor,
    scaling: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Routes token program_id(0); experts lie in a [BLOCK_G, BLOCK_S] array, group by group."""
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    group = tl.arange(0, BLOCK_G)
    member = tl.arange(0, BLOCK_S)[None, :]
    expert = group[:, None] * GROUP_SIZE + member
    inside = (group[:, None] < GROUPS) & (member < GROUP_SIZE)
    logits = tl.load(row_ptr + expert, mask=inside, other=float("-inf")).to(tl.float32)

    top = tl.max(logits)
    total = tl.sum(tl.where(inside, tl.exp(logits - top), 0.0))
    scores = logits
    if SCORING == SOFTMAX:
        scores = tl.div_rn(tl.exp(logits - top), total)
    elif SCORING == SIGMOID:
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))

    choice = logits
    biased = scores
    if HAS_BIAS:
        biased = scores + tl.load(bias_ptr + expert, mask=inside, other=0.0)
        choice = biased
    keys = tl.where(inside, _key(choice, expert), LOWEST)

    if GROUPS > 1:
        if TOP2_SUM:
            biased = tl.where(inside & (biased == biased), biased, float("-inf"))
            biased_keys = tl.where(inside, _key(biased, expert), LOWEST)
            first = biased_keys == tl.max(biased_keys, axis=1)[:, None]
            second = tl.max(tl.where(first, float("-inf"), biased), axis=1)
            group_keys = _key(tl.max(biased, axis=1) + second, group)
        else:  # the lowest bits of an expert's key are unlike in each group, so groups need keys of their own
            clean = tl.where(inside & (choice == choice), choice, float("-inf"))
            group_keys = _key(tl.max(clean, axis=1), group)
        group_keys = tl.where(group < GROUPS, group_keys, LOWEST)
        chosen = group < 0
        for _ in range(TOPK_GROUP):
            best = group_keys == tl.max(group_keys)
            chosen = chosen | best
            group_keys = tl.where(best, LOWEST, group_keys)
        keys = tl.where(chosen[:, None], keys, LOWEST)

    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    for k in range(TOP_K):
        top_key = tl.max(keys)
        ids = tl.where(slot == k, 0x7FFFFFFF - (top_key & 0x7FFFFFFF).to(tl.int32), ids)
        keys = tl.where(keys == top_key, LOWEST, keys)

    # The weights start from the logits again: never from what a bias was added to.
    used = slot < TOP_K
    weights = tl.load(row_ptr + ids, mask=used, other=float("-inf")).to(tl.float32)
    if SCORING == SOFTMAX:
        weights = tl.div_rn(tl.exp(weights - top), total)
    elif SCORING == SIGMOID:
        weights = tl.div_rn(1.0, 1.0 + tl.exp(-weights))
    else:
        weights = tl.exp(weights - tl.max(weights))
        weights = tl.div_rn(weights, tl.sum(tl.where(used, weights, 0.0)))
    if RENORMALIZE:
        weights = tl.div_rn(weights, tl.sum(tl.where(used, weights, 0.0)) + 1e-20)
    tl.store(ids_ptr + token * TOP_K + slot, ids, mask=used)
    tl.store(weights_ptr + token * TOP_K + slot, weights * scaling, mask=used)


def route_topk(logits: Tensor, router: Router, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, best expert first: `routing.reference.route_topk` on the GPU.

    Without a bias and without top2_sum, ids equal the reference's: they depend on comparisons of logits alone.
    Otherwise two experts whose scores differ by less than the error of exp may change places. Weights are within 1e-5
    of the reference's, relatively.

    Args:
        logits: [T, E], bf16, fp16 or fp32; rows may be strided.
        router: the choices.
        bias: fp32 [E], added where experts are chosen.

    Returns:
        ids int32 [T, k] and weights fp32 [T, k].

    Raises:
        ArgumentError: E does not fit the router, or the bias does not fit the logits.
    """
    tokens, experts = logits.shape
    router.check(experts)
    if bias is not None and (bias.shape != (experts,) or bias.dtype != torch.float32 or bias.device != logits.device):
        raise ArgumentError(
            "bias",
            found=f"{bias.dtype} {list(bias.shape)} on {bias.device}",
            expected=f"torch.float32 [{experts}] on {logits.device}",
            next_step="Pass the router's e_score_correction_bias, one value an expert, in fp32.",
        )
    ids = torch.empty((tokens, router.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, router.top_k), dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return ids, weights
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    block_g = power_of_two(router.n_group)
    block_s = power_of_two(experts // router.n_group)
    route_topk_kernel[(tokens,)](
        logits,
        None if bias is None else bias.contiguous(),
        ids,
        weights,
        logits.stride(0),
        float(router.scaling),
        GROUPS=router.n_group,
        GROUP_SIZE=experts // router.n_group,
        TOPK_GROUP=router.topk_group,
        TOP2_SUM=router.group_score == "top2_sum",
        TOP_K=router.top_k,
        SCORING=SCORINGS.index(router.scoring),
        RENORMALIZE=router.renormalize,
        HAS_BIAS=bias is not None,
        BLOCK_G=block_g,
        BLOCK_S=block_s,
        BLOCK_K=power_of_two(router.top_k),
        num_warps=topk_warps(block_g * block_s),
    )
    return ids, weights


def topk_warps(lanes: int) -> int:
    """Warps for a token of this many lanes: 16 lanes a thread, so that up to 512 experts need no barrier."""
    return min(8, max(1, lanes // 512))
