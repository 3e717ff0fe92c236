"""From a PEFT directory to pairs on the device, ready for the slots of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fanfold.errors import AdapterMismatchError, DeviceMemoryError, FanfoldError, of_file
from fanfold.lora.adapter import opened_adapter
from fanfold.lora.bind import bind
from fanfold.lora.convert import convert, stored_bytes
from fanfold.lora.description import pairs_of
from fanfold.lora.files import AdapterFile
from fanfold.lora.site import ExpertSite, Pairs, Site
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
        with opened_adapter(path) as (adapter, file):
            bound = bind(adapter, sites, partial=single_layer)
            for at, pairs in bound.items():
                _check_ranks(at, pairs, max_rank)
            return _converted(bound, sites, file)
    except FanfoldError as error:
        raise of_file(error, str(path)) from error


def _converted(bound: Mapping[str, Pairs], sites: Mapping[str, Site], file: AdapterFile) -> dict[str, Pairs]:
    """Site after site, so that the host holds no more of the file than one of them takes."""
    made: dict[str, Pairs] = {}
    try:
        for at, pairs in bound.items():
            with loading_on(sites[at].device):
                made[at] = convert(_read(pairs, file, sites[at].device), sites[at])
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


def _read(pairs: Pairs, file: AdapterFile, device: torch.device) -> Pairs:
    """The same pairs with the values of the file."""
    listed: Mapping[Any, LoraPair] = {None: pairs} if isinstance(pairs, LoraPair) else pairs
    values = iter(file.read([tensor for pair in listed.values() for tensor in (pair.a, pair.b)], device))
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
