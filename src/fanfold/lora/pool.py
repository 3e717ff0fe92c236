"""AdapterPool: named adapters in the slots of a model, loaded and dropped while others are in use."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from fanfold.errors import ArgumentError
from fanfold.lora import refusals
from fanfold.lora.agreement import agreement_of
from fanfold.lora.description import Loaded
from fanfold.lora.naming import BASE, check_name, checked_names
from fanfold.lora.prepare import prepare
from fanfold.lora.rows import Rows
from fanfold.lora.site import Pairs, Site
from fanfold.lora.streams import loading_on, settle
from fanfold.spec.lora import MOST_RANK


class AdapterPool:
    """The adapters of a model or of one expert layer.

    Loading, replacing and unloading may happen in other threads, while rows that use other adapters run. `using`
    is for one thread at a time: a model runs one batch at a time.

    Args:
        target: a model of fanfold.load_model or a fanfold.Experts. For a single expert layer, the parts of
            an adapter that belong elsewhere are left out.
        slots: adapters that fit at the same time.
        max_rank: the largest rank of a pair, up to 512. On a GPU a limit above 32 costs a launch more a projection.
        evict: make room by unloading the idle adapter that was used longest ago, where every slot is taken.

    A new pool takes the place of the target's last one, whose adapters are gone, and with it every CUDA graph that was
    captured in a `using` block.

    Where experts are spread over processes, `load`, `replace` and `unload` are made on all of them, in the same order:
    all do it, or none does. Each reads and holds the pairs of its own experts.

    Raises:
        ArgumentError: `target` takes no adapters, `slots` is less than 1, or `max_rank` outside [1, 512].
    """

    def __init__(self, target: object, slots: int = 8, *, max_rank: int = 64, evict: bool = False) -> None:
        sites: object = getattr(target, "adapter_sites", None)
        rows: object = getattr(target, "adapter_rows", None)
        if not isinstance(sites, Mapping) or not isinstance(rows, Rows):
            raise ArgumentError(
                "AdapterPool target",
                found=f"{type(target).__name__}, without adapter_sites and adapter_rows",
                expected="a model of fanfold.load_model, or fanfold.Experts",
                next_step="Load the checkpoint with fanfold.load_model or fanfold.load_experts.",
            )
        if slots < 1:
            raise refusals.size("slots", slots, "a whole number >= 1", "number of adapters to hold at the same time")
        if not 1 <= max_rank <= MOST_RANK:
            raise refusals.size("max_rank", max_rank, f"1 to {MOST_RANK}", "largest rank of the adapters")
        self._sites = cast("Mapping[str, Site]", sites)
        self._rows = rows
        self._together = agreement_of(target)
        self._slots = slots
        self._max_rank = max_rank
        self._evict = evict
        self._entries: dict[str, Loaded] = {}
        self._users: Counter[str] = Counter()
        self._uses: Counter[str] = Counter()
        self._evictions = 0
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        rows.holder = weakref.ref(self)
        settle(self._sites)
        for site in self._sites.values():
            site.reserve(slots, max_rank)

    def load(self, name: str, path: str | Path) -> int:
        """Loads an adapter under a new name.

        A failed load leaves the pool as it was.

        Args:
            name: any text but "base".
            path: a PEFT directory.

        Returns:
            The adapter's slot.

        Raises:
            ArgumentError: the name is empty or reserved.
            AdapterExistsError: the name is taken.
            PoolFullError: every slot is taken; with `evict`, by adapters in use.
            DeviceMemoryError: the device has no room for it.
            FanfoldError: what read_adapter and bind raise.
        """
        with self._together(f"load adapter {name!r}", Path(path), loaded=str(self._contents())):
            check_name(name)
            with self._lock:
                self._check_free(name)  # before the files are read
            pairs = prepare(path, self._sites, self._max_rank)
        with self._lock:
            entry = Loaded(self._free_slot(name), Path(path), pairs)
            self._fill(entry, None)
            self._entries[name] = entry
        return entry.slot

    def replace(self, name: str, path: str | Path, *, wait: bool = False) -> int:
        """Puts another adapter in the place of a loaded one, under the same name and slot.

        A failed replacement leaves the old one in place.

        Args:
            name: of a loaded adapter.
            path: a PEFT directory.
            wait: until no `using` block runs with the old one, instead of refusing.

        Returns:
            The slot.

        Raises:
            UnknownAdapterError: no adapter has that name.
            AdapterBusyError: it is in use.
            DeviceMemoryError: the device has no room for it beside the old one.
            FanfoldError: what read_adapter and bind raise.
        """
        with self._together(f"replace adapter {name!r}", Path(path), loaded=str(self._contents())):
            with self._lock:
                self._idle_entry(name, wait)
            pairs = prepare(path, self._sites, self._max_rank)
        with self._lock:
            old = self._idle_entry(name, wait)
            settle(self._sites)
            entry = Loaded(old.slot, Path(path), pairs)
            self._fill(entry, old)
            self._entries[name] = entry
        return entry.slot

    def unload(self, name: str, *, wait: bool = False) -> None:
        """Drops an adapter and frees its slot.

        Args:
            name: of a loaded adapter.
            wait: until no `using` block runs with it, instead of refusing.

        Raises:
            UnknownAdapterError: no adapter has that name.
            AdapterBusyError: it is in use.
        """
        with self._together(f"unload adapter {name!r}"), self._lock:
            self._idle_entry(name, wait)
        with self._lock:
            self._idle_entry(name, wait)
            self._drop(name)

    def names(self) -> list[str]:
        """The loaded adapters, by slot."""
        return list(self._contents())

    def slot(self, name: str) -> int:
        """The slot of an adapter.

        Raises:
            UnknownAdapterError: no adapter has that name.
        """
        with self._lock:
            return self._entry(name).slot

    @contextmanager
    def using(self, names: Sequence[str | None]) -> Generator[None]:
        """Inside the block, row i of every batch runs with adapter names[i]; None or "base" = the base.

        Blocks nest: leaving one restores the list around it. Adapters in use can't be replaced or unloaded.

        Args:
            names: one entry for each row of the batch (for a single expert layer: of the tokens).

        Raises:
            ArgumentError: `names` is not a list of names and None.
            UnknownAdapterError: no adapter has one of the names.
        """
        used = checked_names(names)
        taken = set(used) - {BASE}
        with self._lock:
            slots = [-1 if name == BASE else self._entry(name).slot for name in used]
            self._users.update(taken)
            self._uses.update(taken)
            for name in taken:  # in order of use, for eviction
                self._entries[name] = self._entries.pop(name)
        outer = self._rows.slots
        self._rows.set(slots)
        try:
            yield
        finally:
            self._rows.set(outer)
            with self._lock:
                self._users.subtract(taken)
                self._released.notify_all()

    def info(self) -> list[dict[str, object]]:
        """The loaded adapters by slot, for people and for JSON.

        Each with: name, slot, path, ranks and scales (ascending), targets (how many pairs for gate, up, down
        and linear modules), bytes (resident, in the dtype of the model).
        """
        with self._lock:
            entries = sorted(self._entries.items(), key=lambda item: item[1].slot)
        return [{"name": name, "slot": entry.slot, "path": str(entry.path), **entry.facts} for name, entry in entries]

    def stats(self) -> dict[str, Any]:
        """Figures of the pool.

        Returns:
            `slots` and `used`; `bytes` of the pairs (ranks padded to 8); `uses` of each loaded adapter, one a `using`
            block; `evictions`; `unknown_ids`, the tokens seen with an id that is no slot's (on a GPU; they ran as the
            base). Reading the last waits for the device.
        """
        with self._lock:
            entries = list(self._entries.values())
            uses = {name: self._uses[name] for name in self._entries}
            evictions = self._evictions
        return {
            "slots": self._slots,
            "used": len(entries),
            "bytes": sum(cast("int", entry.facts["bytes"]) for entry in entries),
            "uses": uses,
            "evictions": evictions,
            "unknown_ids": sum(site.unknown_ids() for site in self._sites.values()),
        }

    def _contents(self) -> dict[str, int]:
        """Name -> slot of the loaded adapters, by slot."""
        with self._lock:
            return dict(sorted(((name, entry.slot) for name, entry in self._entries.items()), key=lambda item: item[1]))

    def _drop(self, name: str) -> None:
        settle(self._sites)
        entry = self._entries.pop(name)
        for path in entry.pairs:
            self._sites[path].drop(entry.slot)
        del self._uses[name]

    def _fill(self, entry: Loaded, old: Loaded | None) -> None:
        before: Mapping[str, Pairs] = {} if old is None else old.pairs
        try:
            with self._together(f"fill slot {entry.slot}"):
                for path, pairs in entry.pairs.items():
                    with loading_on(self._sites[path].device):  # no row runs with the slot: nothing to wait for
                        self._sites[path].put(entry.slot, pairs)
                for path in before.keys() - entry.pairs.keys():
                    self._sites[path].drop(entry.slot)
        except BaseException:  # a device out of memory, or an interrupt: nothing half-loaded stays
            for path in entry.pairs.keys() - before.keys():
                self._sites[path].drop(entry.slot)
            for path, pairs in before.items():
                self._sites[path].put(entry.slot, pairs)
            raise

    def _check_holder(self) -> None:
        if self._rows.holder is None or self._rows.holder() is not self:
            raise refusals.displaced()

    def _check_free(self, name: str) -> None:
        """Whether there is a slot for a new name, if need be by eviction."""
        self._check_holder()
        if name in self._entries:
            raise refusals.exists(name)
        if len(self._entries) == self._slots and not (self._evict and self._idle()):
            raise refusals.full(name, self._slots, list(self._entries))

    def _free_slot(self, name: str) -> int:
        """The lowest free slot; makes one by eviction."""
        self._check_free(name)
        if len(self._entries) == self._slots:
            self._drop(self._idle()[0])
            self._evictions += 1
        return min(set(range(self._slots)) - {entry.slot for entry in self._entries.values()})

    def _idle(self) -> list[str]:
        """Adapters that no `using` block runs with, used longest ago first."""
        return [name for name in self._entries if self._users[name] == 0]

    def _entry(self, name: str) -> Loaded:
        self._check_holder()
        if name not in self._entries:
            raise refusals.unknown(name, list(self._entries))
        return self._entries[name]

    def _idle_entry(self, name: str, wait: bool) -> Loaded:
        entry = self._entry(name)
        while wait and self._users[name] > 0:
            self._released.wait()
            entry = self._entry(name)
        if self._users[name] > 0:
            raise refusals.busy(name)
        return entry
