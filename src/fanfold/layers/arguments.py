"""Arguments of a layer's call: shapes, dtypes and devices alone, so that nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.layers.moving import short_name

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def check_call(
    hidden: Tensor, ids: Tensor, weights: Tensor, adapter_ids: Tensor | None, width: int, device: torch.device
) -> None:
    """Whether they are of one batch, and where the layer is.

    Args:
        hidden: to be [T, H].
        ids: to be integers [T, k].
        weights: to be [T, k].
        adapter_ids: to be integers [T], or None.
        width: H.
        device: of the layer.

    Raises:
        ArgumentError: names the argument, what was found and what was expected.
    """
    tokens = hidden.shape[0] if hidden.dim() else 0
    top_k = ids.shape[1] if ids.dim() == 2 else 0
    wanted: list[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = [
        ("hidden", hidden, (tokens, width), FLOATS),
        ("topk_ids", ids, (tokens, top_k), INTEGERS),
        ("topk_weights", weights, (tokens, top_k), FLOATS),
    ]
    if adapter_ids is not None:
        wanted.append(("adapter_ids", adapter_ids, (tokens,), INTEGERS))
    for name, tensor, shape, dtypes in wanted:
        if tuple(tensor.shape) != shape or tensor.dtype not in dtypes or tensor.device != device:
            raise ArgumentError(
                f"Experts.forward: {name}",
                found=f"{short_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}",
                expected=f"{' or '.join(map(short_name, dtypes))} {list(shape)} on {device}",
                next_step="Pass hidden [T, H], topk_ids and topk_weights [T, k], adapter_ids [T].",
            )
