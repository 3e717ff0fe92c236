"""Pulse: a sign of life of every rank, so that a rank that is gone can be told from one that waits."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Any, cast

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

LOG = logging.getLogger("fanfold")
BEAT = 0.5
"""Seconds between two signs."""
QUIET = 15.0
"""Seconds without one after which a rank counts as gone."""
END = b"end"


class Pulse:
    """Counts on in the group's store, from a thread: ranks that wait in a collective beat, those that are gone do not.

    The thread also logs, as an error, which rank has gone: where NCCL waits for it no exception says so.

    Args:
        store: of the group.
        rank: this one.
        size: ranks of the group.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store: Any = cast("Any", store).clone()  # a connection of its own: one that waits blocks all who share it
        self._rank = rank
        self._keys = [f"pulse/{other}" for other in range(size)]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._logged: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fanfold-pulse", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread, and tells the others that this rank has ended."""
        self._stop.set()
        self._thread.join(timeout=2 * BEAT)

    def gone(self) -> list[int]:
        """Ranks that have ended, and those without a sign of life for QUIET seconds."""
        now = time.monotonic()
        seen = sorted(self._seen.items())
        return [rank for rank, (value, changed) in seen if value == END or now - changed >= QUIET]

    def _run(self) -> None:
        number, begun = 0, False
        try:
            while not self._stop.wait(BEAT if number else 0):
                self._store.set(self._keys[self._rank], str(number))
                number += 1
                begun = begun or self._store.check(self._keys)
                if begun:
                    self._look()
            self._store.set(self._keys[self._rank], END.decode())
        except DistError:  # the store is gone, and with it the group
            return

    def _look(self) -> None:
        now = time.monotonic()
        for rank, value in enumerate(self._store.multi_get(self._keys)):
            before, changed = self._seen.get(rank, (b"", now))
            self._seen[rank] = value, now if value != before else changed
            if value not in (END, b"") and now - self._seen[rank][1] >= QUIET and rank not in self._logged:
                self._logged.add(rank)
                LOG.error("rank %d is gone: no sign of life for %g s", rank, QUIET)
