"""Operations of the grouped product.

T tokens, k experts a token, R = T*k rows, E experts, P halves. `work` and `tile` are those of plan_sort; the reference
reads `expert_offsets` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.formats.codec import dequantize_expert
from fanfold.kernels.grouped.reference import grouped
from fanfold.ops.op import Op
from fanfold.ops.packed import Packed, projection_of, schema
from fanfold.routing.reference import plan_sort
from fanfold.spec.launch import LaunchConfig
from fanfold.spec.weights import ProjectionWeights
from fanfold.spec.work import WorkList

PLAN = "Tensor expert_offsets, Tensor sorted_rows, Tensor work, int tile"


def plan_tile(weights: ProjectionWeights, dtype: torch.dtype, rows: int, device: torch.device) -> int:
    """The tile that plan_sort must make for a product; gate_up and down of one layer have the same.

    Args:
        weights: the projection.
        dtype: of the activations.
        rows: R.
        device: where the product runs.

    Returns:
        Most rows of a work slot; on a CPU, where the reference runs, any would do.

    Raises:
        UnavailableError: no kernel runs there.
    """
    if device.type == "cpu":
        return 16
    from fanfold.kernels.common.device import arch_of
    from fanfold.kernels.grouped.configs import config_for

    return config_for(weights.format, weights.k, dtype, arch_of(device), rows, weights.num_experts).block_t


def grouped_gate_up(
    x: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, work: Tensor, tile: int, top_k: int, *packed: *Packed
) -> Tensor:
    """[T, H] -> y1 [R, P*N] at sorted positions; the row of x is the token of the position."""
    tokens = (sorted_rows // max(top_k, 1)).long()
    return _product(x[tokens], expert_offsets, projection_of(*packed))


def grouped_gate_up_cuda(
    x: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, work: Tensor, tile: int, top_k: int, *packed: *Packed
) -> Tensor:
    """grouped_gate_up on the GPU, in one launch. Rows of no expert are not written."""
    from fanfold.kernels.grouped import launch

    weights = projection_of(*packed)
    config = _config(weights, x, sorted_rows.numel())
    return launch.grouped_gate_up(x, weights, WorkList(work, tile), sorted_rows, top_k, config)


def grouped_gate_up_fake(
    x: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, work: Tensor, tile: int, top_k: int, *packed: *Packed
) -> Tensor:
    """Shapes of grouped_gate_up."""
    _, _, tensors, _, n, _ = packed
    return x.new_empty((sorted_rows.shape[0], tensors[0].shape[1] * n))


def grouped_down(
    h: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, work: Tensor, tile: int, *packed: *Packed
) -> Tensor:
    """[R, I] at sorted positions -> y2 [R, H] at sorted positions."""
    return _product(h, expert_offsets, projection_of(*packed))


def grouped_down_cuda(
    h: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, work: Tensor, tile: int, *packed: *Packed
) -> Tensor:
    """grouped_down on the GPU, in one launch. Rows of no expert are not written."""
    from fanfold.kernels.grouped import launch

    weights = projection_of(*packed)
    return launch.grouped_down(h, weights, WorkList(work, tile), sorted_rows, _config(weights, h, sorted_rows.numel()))


def grouped_down_fake(
    h: Tensor, expert_offsets: Tensor, sorted_rows: Tensor, work: Tensor, tile: int, *packed: *Packed
) -> Tensor:
    """Shapes of grouped_down."""
    return h.new_empty((h.shape[0], packed[4]))


def gather_gate_up(x: Tensor, topk_ids: Tensor, *packed: *Packed) -> Tensor:
    """[T, H] -> y1 [R, P*N] by row = token*k + slot, without a plan; rows of no expert are 0."""
    top_k = topk_ids.shape[1]
    return _by_row(x.repeat_interleave(top_k, dim=0), topk_ids, projection_of(*packed))


def gather_gate_up_cuda(x: Tensor, topk_ids: Tensor, *packed: *Packed) -> Tensor:
    """gather_gate_up on the GPU, in one launch: a weight tile is read once for each of its rows. For few rows.

    Rows of no expert are not written.
    """
    from fanfold.kernels.grouped import rows

    weights = projection_of(*packed)
    return rows.gather_gate_up(x, weights, topk_ids.contiguous(), _config(weights, x, topk_ids.numel()))


def gather_gate_up_fake(x: Tensor, topk_ids: Tensor, *packed: *Packed) -> Tensor:
    """Shapes of gather_gate_up."""
    _, _, tensors, _, n, _ = packed
    return x.new_empty((topk_ids.shape[0] * topk_ids.shape[1], tensors[0].shape[1] * n))


def gather_down(h: Tensor, topk_ids: Tensor, *packed: *Packed) -> Tensor:
    """[R, I] by row -> y2 [R, H] by row, without a plan; rows of no expert are 0."""
    return _by_row(h, topk_ids, projection_of(*packed))


def gather_down_cuda(h: Tensor, topk_ids: Tensor, *packed: *Packed) -> Tensor:
    """gather_down on the GPU, in one launch. Rows of no expert are not written."""
    from fanfold.kernels.grouped import rows

    weights = projection_of(*packed)
    return rows.gather_down(h, weights, topk_ids.contiguous(), _config(weights, h, topk_ids.numel()))


def gather_down_fake(h: Tensor, topk_ids: Tensor, *packed: *Packed) -> Tensor:
    """Shapes of gather_down."""
    return h.new_empty((h.shape[0], packed[4]))


def _config(weights: ProjectionWeights, x: Tensor, rows: int) -> LaunchConfig:
    from fanfold.kernels.common.device import arch_of
    from fanfold.kernels.grouped.configs import config_for

    return config_for(weights.format, weights.k, x.dtype, arch_of(x.device), rows, weights.num_experts)


def _by_row(x: Tensor, topk_ids: Tensor, projection: ProjectionWeights) -> Tensor:
    route = plan_sort(topk_ids, projection.num_experts)
    y = _product(x[route.sorted_rows.long()], route.expert_offsets, projection)
    y[int(route.expert_offsets[-1]) :] = 0
    return y[route.positions.long()]


def _product(x: Tensor, expert_offsets: Tensor, projection: ProjectionWeights) -> Tensor:
    bias = projection.bias
    halves = [
        grouped(
            x,
            lambda e, p=p: dequantize_expert(projection, e, p),
            expert_offsets,
            projection.n,
            None if bias is None else bias[:, p],
        )
        for p in range(projection.halves)
    ]
    return torch.cat(halves, dim=1)


OPS = {
    "grouped_gate_up": Op(
        f"(Tensor x, {PLAN}, int top_k, {schema()}) -> Tensor",
        grouped_gate_up,
        grouped_gate_up_cuda,
        grouped_gate_up_fake,
    ),
    "grouped_down": Op(f"(Tensor h, {PLAN}, {schema()}) -> Tensor", grouped_down, grouped_down_cuda, grouped_down_fake),
    "gather_gate_up": Op(
        f"(Tensor x, Tensor topk_ids, {schema()}) -> Tensor", gather_gate_up, gather_gate_up_cuda, gather_gate_up_fake
    ),
    "gather_down": Op(
        f"(Tensor h, Tensor topk_ids, {schema()}) -> Tensor", gather_down, gather_down_cuda, gather_down_fake
    ),
}
