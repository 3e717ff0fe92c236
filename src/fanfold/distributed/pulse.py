"""Pulse: a sign of life of every rank, so that a rank that is gone can be told from one that waits."""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

BEAT = 0.5
"""Seconds between two signs."""


class Pulse:
    """Counts on in the group's store, from a thread: ranks that wait in a collective beat, those that are gone do not.

    Args:
        store: of the group.
        rank: this one.
        size: ranks of the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = cast("Any", store).clone()  # a connection of its own: one that waits blocks all who share it
        self._rank, self._size = rank, size
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fanfold-pulse", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=2 * BEAT)

    def quiet(self, store: Store, seconds: float) -> list[int]:
        """Ranks that have begun to beat and have been seen without a beat for so long.

        Args:
            store: to look in, of the calling thread.
            seconds: as said. It has to be called more often than that.
        """
        now = time.monotonic()
        for rank in range(self._size):
            key = f"pulse/{rank}"
            if rank != self._rank and store.check([key]):
                value = store.get(key)
                if value != self._seen.get(rank, (b"", 0.0))[0]:
                    self._seen[rank] = value, now
        return [rank for rank, (_, changed) in sorted(self._seen.items()) if now - changed >= seconds]

    def _beat(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                self._store.set(f"pulse/{self._rank}", str(number))
            except DistError:  # the store is gone, and with it the group
                return
            number += 1
            self._stop.wait(BEAT)
