"""Pairs as a site keeps them: in its dtype, on its device, in one piece of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fanfold.errors import TensorError
from fanfold.lora.site import OrderedSite, Pairs, Site
from fanfold.spec import LoraPair
from fanfold.spec.lora import RANK_ALIGN, padded_rank

Key = tuple[object, ...]
Place = tuple[str, int]


class _Stored(NamedTuple):
    """A tensor, the shape that it is stored with (its own, and zeros behind the rank), and where it is of.

    `ordered`: the dimension that lies in the site's order of hidden values; None: neither.
    """

    tensor: Tensor
    shape: tuple[int, int]
    projection: str
    expert: int
    ordered: int | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def convert(pairs: Pairs, site: Site) -> Pairs:
    """Copies for `site`, in the layout that kernels read by address, made on the current stream.

    Every A is stored as [padded rank, K] and every B as [N, padded rank], zeros behind the rank, one behind the other
    in a single allocation; the pairs are views of them without the zeros. A tensor that pairs share is stored once.
    Where the site's experts make h in an order of their own, outputs of gate and up and inputs of down lie in it, each
    expert's apart.

    Raises:
        TensorError: a value is too large for the site's dtype.
        torch.OutOfMemoryError: the device has no room.
    """
    listed = _listed(pairs)
    order = site.hidden_order if isinstance(site, OrderedSite) else None
    keys, stored = _stored(listed, order is not None)
    runs = _runs(stored)
    padded = any(pair.rank % RANK_ALIGN for pair in listed.values())
    allocate = torch.zeros if padded else torch.empty
    memory = allocate(sum(tensor.size for tensor in stored.values()), dtype=site.dtype, device=site.device)
    views: dict[Key, Tensor] = {}
    offset = 0
    for run in runs:
        first = stored[run[0]]
        rows, columns = first.tensor.shape
        size = len(run) * first.size
        part = memory[offset : offset + size].view(len(run), *first.shape)[:, :rows, :columns]
        part.copy_(_in_order(_together([stored[key].tensor for key in run]), [stored[key] for key in run], order))
        offset += size
        views |= zip(run, part.unbind(), strict=True)
    if any(tensor.tensor.dtype != site.dtype for tensor in stored.values()):
        _check_finite(memory, [tensor.tensor for tensor in stored.values()], site)
    made = {place: LoraPair(views[keys[place][0]], views[keys[place][1]], pair.scale) for place, pair in listed.items()}
    return made["", 0] if isinstance(pairs, LoraPair) else cast("Pairs", made)


def stored_bytes(pairs: Pairs, dtype: torch.dtype) -> int:
    """What `convert` allocates."""
    return sum(tensor.size for tensor in _stored(_listed(pairs), False)[1].values()) * dtype.itemsize


def _listed(pairs: Pairs) -> Mapping[Place, LoraPair]:
    return {("", 0): pairs} if isinstance(pairs, LoraPair) else cast("Mapping[Place, LoraPair]", pairs)


def _stored(pairs: Mapping[Place, LoraPair], ordered: bool) -> tuple[dict[Place, tuple[Key, Key]], dict[Key, _Stored]]:
    """Keys of each place's A and B, and each tensor once: every A, then every B."""
    keys: dict[Place, tuple[Key, Key]] = {}
    every_a: dict[Key, _Stored] = {}
    every_b: dict[Key, _Stored] = {}
    for (projection, expert), pair in pairs.items():
        a, b, rank = pair.a, pair.b, padded_rank(pair.rank)
        inputs, outputs = ordered and projection == "down", ordered and projection != "down"
        a_key = (*_key(a), expert) if inputs else _key(a)
        b_key = (*_key(b), expert) if outputs else _key(b)
        keys[projection, expert] = a_key, b_key
        every_a.setdefault(a_key, _Stored(a, (rank, a.shape[1]), projection, expert, 1 if inputs else None))
        every_b.setdefault(b_key, _Stored(b, (b.shape[0], rank), projection, expert, 0 if outputs else None))
    return keys, every_a | every_b


def _key(tensor: Tensor) -> Key:
    """What tells tensors apart by their memory, such as one A that gate and up or all experts share."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _runs(stored: Mapping[Key, _Stored]) -> list[list[Key]]:
    """Tensors that one copy can move: of one projection, alike, and each as far behind the one before it.

    The experts of a projection lie like this, in files and in stacked parameters.
    """
    alike: dict[Key, list[tuple[int, Key]]] = {}
    for key, (tensor, _, projection, _, _) in stored.items():
        storage, dtype, _, shape, stride = key[:5]
        alike.setdefault((projection, storage, dtype, shape, stride), []).append((int(tensor.storage_offset()), key))
    runs: list[list[Key]] = []
    for placed in alike.values():
        placed.sort(key=lambda item: item[0])
        before, step = placed[0][0], None
        runs.append([placed[0][1]])
        for offset, key in placed[1:]:
            if step in (None, offset - before):
                runs[-1].append(key)
                step = offset - before
            else:
                runs.append([key])
                step = None
            before = offset
    return runs


def _together(tensors: list[Tensor]) -> Tensor:
    """[n, rows, columns], a view of the tensors of a run."""
    first = tensors[0]
    step = tensors[1].storage_offset() - first.storage_offset() if len(tensors) > 1 else 0
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), first.storage_offset())


def _in_order(values: Tensor, run: list[_Stored], order: Tensor | None) -> Tensor:
    """The tensors of a run, [n, rows, columns], with their hidden values in the order [E, I] of their experts."""
    dim = run[0].ordered
    if order is None or dim is None:
        return values
    places = order[[tensor.expert for tensor in run]].long()
    places = places[:, :, None] if dim == 0 else places[:, None, :]
    return values.to(order.device).gather(dim + 1, places.expand(values.shape))


def _check_finite(memory: Tensor, tensors: list[Tensor], site: Site) -> None:
    if not torch.stack(memory.aminmax()).isfinite().all():
        largest = max(float(tensor.abs().max()) for tensor in tensors)
        raise TensorError(
            f"adapter weights at {site.path}",
            found=f"values up to {largest:g}",
            expected=f"values within {site.dtype}, up to {torch.finfo(site.dtype).max:g}",
            next_step="Load the model with dtype=torch.bfloat16 or torch.float32.",
        )
