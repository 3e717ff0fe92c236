"""Act-order: K of every expert sorted by group, so that groups are consecutive again."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import UnsupportedError
from fanfold.spec.weights import ProjectionWeights

NEXT_STEP = "Use the portable product, which looks the group of each input up."


def sorted_inputs(name: str, weights: ProjectionWeights) -> Tensor:
    """The order that sorts K by group, stable: int32 [E, K], sorted input j is the file's input order[e, j].

    Args:
        name: of the projection, for errors.
        weights: with `g_idx` [E, P, K].

    Raises:
        UnsupportedError: a group is not full, or gate and up of an expert have another order.
    """
    g_idx, k = weights.tensors["g_idx"], weights.k
    if weights.halves == 2:
        unlike = (g_idx[:, 0] != g_idx[:, 1]).any(1)
        if bool(unlike.any()):
            raise UnsupportedError(
                f"{weights.format} {name} on sm_90",
                found=f"a g_idx of gate unlike that of up, in {int(unlike.sum())} experts, "
                f"the first {int(unlike.nonzero()[0])}",
                expected="one g_idx for gate and up of an expert",
                next_step=NEXT_STEP,
            )
    groups, order = torch.sort(g_idx[:, 0], stable=True)
    uneven = (groups != torch.arange(k, device=g_idx.device) // weights.format.group_size).any(1)
    if bool(uneven.any()):
        raise UnsupportedError(
            f"{weights.format} {name} on sm_90",
            found=f"groups of other sizes in {int(uneven.sum())} experts, the first {int(uneven.nonzero()[0])}",
            expected=f"{weights.format.group_size} inputs in every group",
            next_step=NEXT_STEP,
        )
    return order.int()
