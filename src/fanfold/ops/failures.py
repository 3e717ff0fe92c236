"""Failures of a device by name: no room for weights or for a call, kernels that it does not load or launch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from fanfold.errors import DeviceMemoryError, FanfoldError, UnavailableError

OF_TRITON = ("Triton Error", "Failed to find C compiler")
"""How errors of Triton begin that are plain RuntimeErrors: of the driver, and where it can't build its launcher."""
LONGEST = 300


def named(error: Exception, what: str) -> FanfoldError | None:
    """What to raise in place of an error of torch's allocator or of Triton; None for all others.

    Args:
        error: what was raised.
        what: the operation or layer it was raised in.
    """
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError):
        return DeviceMemoryError(
            what,
            found=_shortened(text.partition(" is free.")[0] + " is free" if " is free." in text else text),
            expected="room for the activations of the call",
            next_step="Free memory there, or pass fewer tokens at once.",
        )
    if text.startswith(OF_TRITON) or any(kind.__module__.startswith("triton.") for kind in type(error).__mro__):
        return UnavailableError(
            what,
            found=f"{type(error).__name__}: {_shortened(text)}",
            expected="a kernel that this device compiles, loads and launches",
            next_step='`fanfold doctor` runs a small layer on it; implementation="reference" needs no kernel.',
        )
    return None


def naming_failures(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with its failures as `named` has them."""

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            failure = named(error, what)
            if failure is None:
                raise
            raise failure from error

    return run


@contextmanager
def placing(what: str, nbytes: int, device: torch.device) -> Generator[None]:
    """Inside, weights are put on a device.

    Args:
        what: whose weights.
        nbytes: their size.
        device: where they go.

    Raises:
        DeviceMemoryError: there is no room for them; says what is needed and what is there.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        raise DeviceMemoryError(
            what,
            found=f"{_gb(free)} of {_gb(total)} free on {device}, and {_gb(cached)} in torch's cache",
            expected=f"{_gb(nbytes)}, and as much again for a moment where weights are repacked",
            next_step="Free memory there, use a device with more of it, or weights of fewer bits.",
        ) from error


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
