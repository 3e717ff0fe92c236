"""Operations of routing: top-k and the plan in both forms. T tokens, k experts a token, R = T*k rows, E experts."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.ops.op import Op
from fanfold.routing import reference
from fanfold.routing.sizes import block_count, work_slots
from fanfold.spec.router import GroupScore, Router, Scoring


def route_topk(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: Scoring,
    renormalize: bool,
    n_group: int,
    topk_group: int,
    group_score: GroupScore,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """[T, E] logits -> ids int32 [T, k], weights fp32 [T, k], in one launch on a GPU: see spec.Router."""
    router = Router(top_k, scoring, renormalize, n_group, topk_group, group_score, scaling)
    if logits.device.type == "cpu":
        return reference.route_topk(logits, router, bias)
    from fanfold.routing import topk

    with torch.cuda.device_of(logits):
        return topk.route_topk(logits, router, bias)


def route_topk_fake(logits: Tensor, bias: Tensor | None, top_k: int, *choices: object) -> tuple[Tensor, Tensor]:
    """Shapes of route_topk."""
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


def plan_sort(topk_ids: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[T, k] ids -> expert_offsets int32 [E+1], sorted_rows int32 [R], positions int32 [R], work int32 [S, 4].

    See spec.Route and spec.WorkList; `tile` is the most rows of a work slot.
    """
    route = reference.plan_sort(topk_ids, num_experts)
    return route.expert_offsets, route.sorted_rows, route.positions, reference.work_list(route, tile).slots


def plan_sort_cuda(topk_ids: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """plan_sort on the GPU: one launch, two for many rows."""
    from fanfold.routing import plan

    with torch.cuda.device_of(topk_ids):
        route, work = plan.plan_sort(topk_ids, num_experts, tile)
    return route.expert_offsets, route.sorted_rows, route.positions, work.slots


def plan_sort_fake(topk_ids: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes of plan_sort."""
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    offsets, sorted_rows, positions = (
        topk_ids.new_empty((size,), dtype=torch.int32) for size in (num_experts + 1, rows, rows)
    )
    work = topk_ids.new_empty((work_slots(rows, num_experts, tile), 4), dtype=torch.int32)
    return offsets, sorted_rows, positions, work


def plan_blocks(topk_ids: Tensor, num_experts: int, block_rows: int, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[T, k] ids -> entries int32 [B * block_rows], experts int32 [B], padded_total int32 [1]: see spec.Blocks."""
    blocks = reference.plan_blocks(topk_ids, num_experts, block_rows, packed)
    return blocks.entries, blocks.experts, blocks.padded_total


def plan_blocks_cuda(
    topk_ids: Tensor, num_experts: int, block_rows: int, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """plan_blocks on the GPU: one launch for few rows."""
    from fanfold.routing import blocks

    with torch.cuda.device_of(topk_ids):
        found = blocks.plan_blocks(topk_ids, num_experts, block_rows, packed)
    return found.entries, found.experts, found.padded_total


def plan_blocks_fake(
    topk_ids: Tensor, num_experts: int, block_rows: int, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes of plan_blocks."""
    blocks = block_count(topk_ids.shape[0] * topk_ids.shape[1], num_experts, block_rows)
    entries, experts, padded_total = (
        topk_ids.new_empty((size,), dtype=torch.int32) for size in (blocks * block_rows, blocks, 1)
    )
    return entries, experts, padded_total


OPS = {
    "route_topk": Op(
        "(Tensor logits, Tensor? bias, int top_k, str scoring, bool renormalize, int n_group, int topk_group, "
        "str group_score, float scaling) -> (Tensor, Tensor)",
        route_topk,
        route_topk,
        route_topk_fake,
    ),
    "plan_sort": Op(
        "(Tensor topk_ids, int num_experts, int tile) -> (Tensor, Tensor, Tensor, Tensor)",
        plan_sort,
        plan_sort_cuda,
        plan_sort_fake,
        floats=False,
    ),
    "plan_blocks": Op(
        "(Tensor topk_ids, int num_experts, int block_rows, bool packed) -> (Tensor, Tensor, Tensor)",
        plan_blocks,
        plan_blocks_cuda,
        plan_blocks_fake,
        floats=False,
    ),
}
