"""Top-k and the plan of a batch in readable torch (semantics: the layer, steps 1 and 2)."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from fanfold.routing.sizes import block_count, work_slots
from fanfold.spec.route import Route
from fanfold.spec.router import Router
from fanfold.spec.work import Blocks, WorkItems, WorkList


def route_topk(logits: Tensor, router: Router, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts and weights of each token, best expert first.

    Ties go to the lowest expert id. A NaN counts as -inf where experts are chosen, so ids are always in range and never
    repeat; the weights of such a row are what the formula makes of them.

    Args:
        logits: [T, E], bf16, fp16 or fp32; computed in fp32.
        router: the choices.
        bias: fp32 [E], added to the scores where experts are chosen (e_score_correction_bias), never to the weights.

    Returns:
        ids int32 [T, k] and weights fp32 [T, k].

    Raises:
        ArgumentError: E does not fit the router.
    """
    tokens, experts = logits.shape
    router.check(experts)
    logits = logits.float()
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "softmax_topk": logits}[router.scoring]
    biased = _no_nan(scores if bias is None else scores + bias.float())
    # Logits and scores have one order, but two logits may round to one score: without a bias the logits decide.
    choice = _no_nan(logits) if bias is None else biased
    order = torch.argsort(choice, stable=True, descending=True)
    if router.n_group > 1:
        grouped = choice if router.group_score == "max" else biased
        best = grouped.view(tokens, router.n_group, experts // router.n_group).sort(-1, descending=True).values
        group_score = best[..., 0] if router.group_score == "max" else best[..., 0] + best[..., 1]
        groups = torch.argsort(_no_nan(group_score), stable=True, descending=True)[:, : router.topk_group]
        outside = (order // (experts // router.n_group))[..., None].ne(groups[:, None]).all(-1)
        order = order.gather(-1, torch.argsort(outside.int(), stable=True))  # experts of chosen groups first
    ids = order[:, : router.top_k]
    weights = scores.gather(-1, ids)
    if router.scoring == "softmax_topk":
        weights = weights.softmax(-1)
    if router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
    return ids.to(torch.int32), weights * router.scaling


def plan_sort(topk_ids: Tensor, num_experts: int) -> Route:
    """Rows in expert order.

    Args:
        topk_ids: integers [T, k]. Ids outside [0, E) are experts of another rank: their rows come last and belong to
            no expert.
        num_experts: E.

    Returns:
        The Route of R = T*k rows, on the device of `topk_ids`.
    """
    ids = topk_ids.flatten().long()
    key = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    sorted_rows = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    positions = torch.empty_like(sorted_rows)
    positions[sorted_rows] = torch.arange(len(ids), device=ids.device)
    return Route(offsets, sorted_rows.to(torch.int32), positions.to(torch.int32), topk_ids.shape[1])


def work_list(route: Route, tile: int) -> WorkList:
    """The tiles of a Route.

    Args:
        route: the plan.
        tile: rows of a tile.

    Returns:
        The work list; expert e's tiles start at slot expert_offsets[e] // tile + e.
    """
    slots = torch.zeros(work_slots(len(route.sorted_rows), route.num_experts, tile), 4, dtype=torch.int32)
    slots[:, 0] = -1
    offsets = cast(list[int], route.expert_offsets.tolist())
    for expert, (start, end) in enumerate(pairwise(offsets)):
        for number, first in enumerate(range(start, end, tile)):
            slots[start // tile + expert + number] = torch.tensor([expert, first, min(tile, end - first), 0])
    return WorkList(slots.to(route.expert_offsets.device), tile)


def work_items(route: Route, tile: int) -> WorkItems:
    """The tiles of a Route in words; rows beside a word are 0 behind their count."""
    work = work_list(route, tile)
    expert, first, count, _ = work.slots.long().unbind(1)
    words = torch.where(expert < 0, -1, (expert << 48) | (count << 32) | first)
    places = torch.arange(tile, device=words.device)
    inside = places < count[:, None]
    rows = torch.zeros_like(inside, dtype=torch.int32)
    rows[inside] = route.sorted_rows[(first[:, None] + places)[inside]]
    return WorkItems(words, rows, len(route.sorted_rows), tile, False, route.num_experts)


def plan_blocks(topk_ids: Tensor, num_experts: int, block_rows: int, packed: bool = False) -> Blocks:
    """The block-aligned plan.

    Args:
        topk_ids: integers [T, k]; ids outside [0, E) are in no block.
        num_experts: E.
        block_rows: rows of a block.
        packed: entries are sorted positions, not rows.

    Returns:
        The blocks, on the device of `topk_ids`.
    """
    route = plan_sort(topk_ids, num_experts)
    rows = len(route.sorted_rows)
    blocks = block_count(rows, num_experts, block_rows)
    entries = torch.full((blocks, block_rows), rows, dtype=torch.int32)
    experts = torch.full((blocks,), -1, dtype=torch.int32)
    sorted_rows = torch.arange(rows) if packed else route.sorted_rows.cpu()
    offsets = cast(list[int], route.expert_offsets.tolist())
    used = 0
    for expert, (start, end) in enumerate(pairwise(offsets)):
        for first in range(start, end, block_rows):
            part = sorted_rows[first : min(first + block_rows, end)]
            entries[used, : len(part)] = part
            experts[used] = expert
            used += 1
    device = topk_ids.device
    padded_total = torch.tensor([used * block_rows], dtype=torch.int32)
    return Blocks(entries.flatten().to(device), experts.to(device), padded_total.to(device), block_rows, packed)


def _no_nan(values: Tensor) -> Tensor:
    return values.masked_fill(values.isnan(), -torch.inf) + 0.0  # and -0 becomes 0: some sorts tell them apart
