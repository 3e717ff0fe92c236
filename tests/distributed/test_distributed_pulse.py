"""Signs of life, in one process: a rank that beats, one that has stopped, and one that has said that it ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
from torch.distributed import HashStore

from fanfold.distributed import pulse
from fanfold.distributed.pulse import Pulse


def waits_for(found: Callable[[], bool]) -> bool:
    """Whether it comes true within 20 seconds."""
    ends = time.monotonic() + 20
    while not found() and time.monotonic() < ends:
        time.sleep(0.02)
    return found()


def test_who_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(pulse, "BEAT", 0.05)
    monkeypatch.setattr(pulse, "QUIET", 3.0)
    store = HashStore()
    first, second, third = (Pulse(store, rank, 4) for rank in range(3))
    time.sleep(0.3)
    assert first.gone() == []  # not all have begun
    store.set("pulse/3", "7")  # and never again
    assert waits_for(lambda: set(first._seen) == {0, 1, 2, 3})
    assert first.gone() == []
    third.stop()
    assert waits_for(lambda: first.gone() == [2])  # it has said so: no time has to pass
    monkeypatch.setattr(pulse, "QUIET", 0.5)
    with caplog.at_level(logging.ERROR, "fanfold"):
        assert waits_for(lambda: first.gone() == [2, 3])
        assert waits_for(lambda: bool(caplog.messages))
        time.sleep(0.3)
    assert set(caplog.messages) == {"rank 3 is gone: no sign of life for 0.5 s"}
    assert len(caplog.messages) <= 2  # once from each rank that is left
    second.stop()
    first.stop()
