"""The stream on which adapters are loaded, beside what a GPU is doing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import torch


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


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
