"""Tables of pairs: packing a list of pairs, and entries that change in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fanfold.errors import ArgumentError
from fanfold.kernels.lora.sizes import MOST_RANK, padded_rank
from fanfold.spec.adapters import AdapterTable
from fanfold.spec.lora import LoraPair


@dataclass(frozen=True)
class Entry:
    """One pair of an adapter, by address.

    Attributes:
        expert: its id.
        a: address of A, [padded rank, K].
        b: address of B, [N, padded rank].
        scale: fp32 factor.
        rank: unpadded.
    """

    expert: int
    a: int
    b: int
    scale: float
    rank: int


@dataclass(frozen=True)
class PackedEntries:
    """The entries of one adapter and projection by expert: lists of one length, 0 where there is no pair."""

    a: list[int]
    b: list[int]
    scale: list[float]
    rank: list[int]


def pack_entries(entries: Iterable[Entry]) -> PackedEntries | None:
    """Entries by expert.

    Args:
        entries: in any order; of two for one expert the last wins.

    Returns:
        Lists up to the largest expert id, gaps 0 and 0.0; None where there are no entries.

    Raises:
        ArgumentError: a negative expert, or a rank outside [1, 512].
    """
    return _packed({e.expert: (e.a, e.b, e.scale, e.rank) for e in entries})


def pack_pairs(pairs: Mapping[int, LoraPair]) -> PackedEntries | None:
    """`pack_entries` of pairs by expert that lie as tables need them, such as those of `pad_pair`."""
    return _packed({e: (pair.a.data_ptr(), pair.b.data_ptr(), pair.scale, pair.rank) for e, pair in pairs.items()})


def _packed(entries: Mapping[int, tuple[int, int, float, int]]) -> PackedEntries | None:
    if not entries:
        return None
    for expert, (*_, rank) in entries.items():
        if expert < 0 or not 1 <= rank <= MOST_RANK:
            raise ArgumentError(
                "pack_entries",
                found=f"expert {expert}, rank {rank}",
                expected=f"an expert of at least 0 and a rank of 1 to {MOST_RANK}",
                next_step="Pass the pairs of experts only, as the adapter has them.",
            )
    none = 0, 0, 0.0, 0
    columns = zip(*(entries.get(expert, none) for expert in range(max(entries) + 1)), strict=True)
    a, b, scale, rank = map(list, columns)
    return PackedEntries(a, b, scale, rank)


def pad_pair(pair: LoraPair, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """A and B as tables point to them: A [padded rank, K] and B [N, padded rank], zeros behind the rank."""
    rank = padded_rank(pair.rank)
    a = torch.zeros((rank, pair.a.shape[1]), dtype=dtype, device=device)
    b = torch.zeros((pair.b.shape[0], rank), dtype=dtype, device=device)
    a[: pair.rank] = pair.a
    b[:, : pair.rank] = pair.b
    return a, b


def new_table(
    projections: int,
    slots: int,
    experts: int,
    *,
    k: int,
    n: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> AdapterTable:
    """A table without pairs; the arguments are the attributes of AdapterTable.

    Raises:
        ArgumentError: max_rank is above 512.
    """
    if max_rank > MOST_RANK:
        raise ArgumentError(
            "new_table: max_rank",
            found=str(max_rank),
            expected=f"at most {MOST_RANK}",
            next_step="Adapters of a larger rank can't be run.",
        )
    kinds = (torch.int64, torch.int64, torch.float32, torch.int32)
    tensors = [torch.zeros((projections, slots, experts), dtype=kind, device=device) for kind in kinds]
    return AdapterTable(*tensors, k=k, n=n, max_rank=max_rank, dtype=dtype)


def write_slot(table: AdapterTable, projection: int, slot: int, packed: PackedEntries | None) -> None:
    """Replaces all entries of a slot, in place, in the order of the current stream; None removes them.

    Raises:
        ArgumentError: no such projection or slot, an expert beyond the table, or a rank above its `max_rank`.
    """
    projections, slots, experts = table.a.shape
    found = f"projection {projection}, slot {slot}"
    if not (0 <= projection < projections and 0 <= slot < slots):
        raise _wrong(found, f"projections below {projections} and slots below {slots}")
    length = 0 if packed is None else len(packed.rank)
    if length > experts:
        raise _wrong(f"{length} experts", f"at most {experts}, the length of the table")
    if packed is not None and max(packed.rank) > table.max_rank:
        raise _wrong(f"rank {max(packed.rank)}", f"at most {table.max_rank}, the table's max_rank")
    for name in ("a", "b", "scale", "rank"):
        tensor: Tensor = getattr(table, name)
        values = torch.zeros(experts, dtype=tensor.dtype)
        if packed is not None:
            values[:length] = torch.tensor(getattr(packed, name), dtype=tensor.dtype)
        tensor[projection, slot].copy_(values)


def _wrong(found: str, expected: str) -> ArgumentError:
    return ArgumentError(
        "write_slot",
        found=found,
        expected=expected,
        next_step="Pass a pair list that fits the layer and the sizes the table was made with.",
    )
