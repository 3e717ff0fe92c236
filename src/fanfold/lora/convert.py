"""Pairs as a site keeps them: in its dtype, on its device, in one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fanfold.errors import TensorError
from fanfold.lora.description import pairs_of
from fanfold.lora.site import Pairs, Site
from fanfold.spec import LoraPair
from fanfold.spec.lora import padded_rank


def convert(pairs: Pairs, site: Site) -> Pairs:
    """Copies for `site`, in the layout that kernels read by address.

    Every A is stored as [padded rank, K] and every B as [N, padded rank], zeros behind the rank, one behind the other
    in a single allocation; the pairs are views of them without the zeros. A tensor that pairs share is stored once.
    To a GPU the copy runs on a stream of its own, beside what the device is doing.

    Raises:
        TensorError: a value is too large for the site's dtype.
        torch.OutOfMemoryError: the device has no room.
    """
    listed: Mapping[Any, LoraPair] = {None: pairs} if isinstance(pairs, LoraPair) else pairs
    stored = _stored(pairs)
    on_gpu = site.device.type == "cuda"
    size = sum(math.prod(shape) for _, shape in stored.values())
    host = torch.zeros(size, dtype=site.dtype, pin_memory=on_gpu)
    for tensor, view in zip((t for t, _ in stored.values()), _views(host, list(stored.values())), strict=True):
        view.copy_(tensor)
    _check_finite(host, [tensor for tensor, _ in stored.values()], site)
    memory = _to_gpu(host, site.device) if on_gpu else host
    views = dict(zip(stored, _views(memory, list(stored.values())), strict=True))
    made = {place: LoraPair(views[_key(pair.a)], views[_key(pair.b)], pair.scale) for place, pair in listed.items()}
    return made[None] if isinstance(pairs, LoraPair) else made


def stored_bytes(pairs: Pairs, dtype: torch.dtype) -> int:
    """What `convert` allocates."""
    return sum(math.prod(shape) for _, shape in _stored(pairs).values()) * dtype.itemsize


def _stored(pairs: Pairs) -> dict[tuple[object, ...], tuple[Tensor, tuple[int, int]]]:
    """Each tensor once, and its stored shape."""
    listed = pairs_of(pairs)
    stored = {_key(pair.a): (pair.a, (padded_rank(pair.rank), pair.a.shape[1])) for pair in listed}
    return stored | {_key(pair.b): (pair.b, (pair.b.shape[0], padded_rank(pair.rank))) for pair in listed}


def _key(tensor: Tensor) -> tuple[object, ...]:
    """What tells tensors apart by their memory, such as one A that gate and up or all experts share."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _views(memory: Tensor, stored: list[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
    """The part of the memory that each tensor takes, without the padding."""
    views: list[Tensor] = []
    offset = 0
    for tensor, shape in stored:
        part = memory[offset : offset + math.prod(shape)].view(shape)
        views.append(part[: tensor.shape[0], : tensor.shape[1]])
        offset += math.prod(shape)
    return views


def _to_gpu(host: Tensor, device: torch.device) -> Tensor:
    """A copy, complete when this returns; the calling thread waits, the device's other work does not."""
    with torch.cuda.device(device):
        memory = torch.empty_like(host, device=device, pin_memory=False)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # what had the memory before may still run
        with torch.cuda.stream(stream):
            memory.copy_(host, non_blocking=True)
        stream.synchronize()
    return memory


def _check_finite(host: Tensor, tensors: list[Tensor], site: Site) -> None:
    if not torch.isfinite(host).all():
        largest = max(float(tensor.abs().max()) for tensor in tensors)
        raise TensorError(
            f"adapter weights at {site.path}",
            found=f"values up to {largest:g}",
            expected=f"values within {site.dtype}, up to {torch.finfo(site.dtype).max:g}",
            next_step="Load the model with dtype=torch.bfloat16 or torch.float32.",
        )
