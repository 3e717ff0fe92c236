"""The stream on which adapters are loaded, beside what a GPU is doing."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache

import torch

from fanfold.lora.description import pairs_of
from fanfold.lora.site import Pairs, Site


@contextmanager
def loading_on(device: torch.device) -> Generator[None]:
    """Inside the block, a GPU's current stream is its loading stream; at the end what was given to it is done.

    It is one stream for good, because memory goes back to the stream that took it. Nothing waits for the model's own
    stream, and so loading goes on where that one has work for long: who frees pairs has waited for their last use.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
        yield
        torch.cuda.current_stream().synchronize()


def settle(sites: Mapping[str, Site]) -> None:
    """Waits until nothing that a GPU has been given reads pairs that are about to go."""
    for device in {site.device for site in sites.values() if site.device.type == "cuda"}:
        torch.cuda.synchronize(device)


def used_by_current_stream(pairs: Pairs) -> None:
    """Has the allocator wait for the current stream before it gives memory of `convert` to anyone else."""
    first = pairs_of(pairs)[0].a
    if first.is_cuda:
        first.record_stream(torch.cuda.current_stream(first.device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
