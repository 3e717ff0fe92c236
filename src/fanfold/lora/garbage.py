"""Python's garbage collector while an adapter is read."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Generator[None]:
    """Inside the block no collection starts by itself, in any thread.

    An adapter on all experts is tens of thousands of tensors that all stay. As they are made, the collector would walk
    all objects of the process again and again to find that out: half of the time of a load.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
