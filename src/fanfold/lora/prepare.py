"""From a PEFT directory to pairs on the device, ready for the slots of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fanfold.errors import AdapterMismatchError, DeviceMemoryError, FanfoldError, of_file
from fanfold.lora.adapter import opened_adapter
from fanfold.lora.bind import bind
from fanfold.lora.convert import convert, stored_bytes
from fanfold.lora.description import pairs_of
from fanfold.lora.files import AdapterFile
from fanfold.lora.garbage import collector_paused
from fanfold.lora.site import ExpertSite, Pairs, PartialSite, Site
from fanfold.lora.streams import loading_on, used_by_current_stream
from fanfold.spec import LoraPair


def prepare(path: str | Path, sites: Mapping[str, Site], max_rank: int) -> dict[str, Pairs]:
    """The pairs of an adapter by site, as the sites keep them; nothing is put anywhere yet.

    Args:
        path: a PEFT directory.
        sites: of the pool. A single expert layer takes its part of a whole model's adapter; the rest is not read.
        max_rank: of the pool.

    Raises:
        AdapterMismatchError: it belongs to another model, or a rank is above max_rank.
        DeviceMemoryError: the device has no room for it.
        FanfoldError: what read_adapter and bind raise.
    """
    listed = list(sites.values())
    single_layer = len(listed) == 1 and isinstance(listed[0], ExpertSite)
    try:
        with collector_paused(), opened_adapter(path) as (adapter, file):
            bound = bind(adapter, sites, partial=single_layer)
            for at, pairs in bound.items():
                _check_ranks(at, pairs, max_rank)
            here = {at: _held(pairs, sites[at]) for at, pairs in bound.items()}
            return _converted({at: pairs for at, pairs in here.items() if pairs_of(pairs)}, sites, file)
    except FanfoldError as error:
        raise of_file(error, str(path)) from error


def _held(pairs: Pairs, site: Site) -> Pairs:
    """The pairs of the experts that are in this process, by their numbers here."""
    if isinstance(pairs, LoraPair) or not isinstance(site, PartialSite):
        return pairs
    held = site.experts_here
    return {(half, held[expert]): pair for (half, expert), pair in pairs.items() if expert in held}


def _converted(bound: Mapping[str, Pairs], sites: Mapping[str, Site], file: AdapterFile) -> dict[str, Pairs]:
    """Site after site, while a thread reads the next one: the host holds no more of the file than two of them take."""
    made: dict[str, Pairs] = {}
    try:
        with ThreadPoolExecutor(1) as reader:
            ahead = [
                lambda pairs=pairs, device=sites[at].device: file.fetch(_tensors(pairs), device)
                for at, pairs in bound.items()
            ]
            coming = reader.submit(ahead[0]) if ahead else None
            for number, (at, pairs) in enumerate(bound.items()):
                assert coming is not None
                fetched = coming.result()
                if number + 1 < len(ahead):
                    coming = reader.submit(ahead[number + 1])
                with loading_on(sites[at].device):
                    made[at] = convert(_with_values(pairs, file.values(fetched, sites[at].device)), sites[at])
                used_by_current_stream(made[at])
        file.check_unchanged()
        return made
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            "adapter",
            found="no room on the device",
            expected=f"{sum(stored_bytes(pairs, sites[at].dtype) for at, pairs in bound.items())} free bytes",
            next_step="unload() another adapter first; those that are loaded are as they were.",
        ) from error


def _tensors(pairs: Pairs) -> list[Tensor]:
    return [tensor for pair in pairs_of(pairs) for tensor in (pair.a, pair.b)]


def _with_values(pairs: Pairs, tensors: list[Tensor]) -> Pairs:
    """The same pairs of other tensors, in the order of `_tensors`."""
    listed: Mapping[Any, LoraPair] = {None: pairs} if isinstance(pairs, LoraPair) else pairs
    values = iter(tensors)
    read = {place: LoraPair(next(values), next(values), pair.scale) for place, pair in listed.items()}
    return read[None] if isinstance(pairs, LoraPair) else read


def _check_ranks(at: str, pairs: Pairs, max_rank: int) -> None:
    largest = max(pair.rank for pair in pairs_of(pairs))
    if largest > max_rank:
        raise AdapterMismatchError(
            f"adapter at {at}",
            found=f"rank {largest}",
            expected=f"at most {max_rank}, the pool's max_rank",
            next_step=f"Make the pool with AdapterPool(..., max_rank={largest}).",
        )
