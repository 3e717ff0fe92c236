"""AdapterPool: named adapters in the slots of a model, loaded and dropped while others are in use."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fanfold.errors import (
    AdapterBusyError,
    AdapterExistsError,
    ArgumentError,
    FanfoldError,
    PoolFullError,
    UnknownAdapterError,
    of_file,
)
from fanfold.lora.adapter import read_adapter
from fanfold.lora.bind import bind
from fanfold.lora.convert import convert
from fanfold.lora.description import described
from fanfold.lora.rows import Rows
from fanfold.lora.site import ExpertSite, Pairs, Site

BASE = "base"
"""The reserved name of no adapter."""


@dataclass(frozen=True, eq=False)
class _Entry:
    slot: int
    path: Path
    pairs: Mapping[str, Pairs]


class AdapterPool:
    """The adapters of a model or of one expert layer.

    Loading, replacing and unloading may happen in other threads, while rows that use other adapters run. `using`
    is for one thread at a time: a model runs one batch at a time.

    Args:
        target: a model of fanfold.load_model or a fanfold.Experts. For a single expert layer, the parts of
            an adapter that belong elsewhere are left out.
        slots: adapters that fit at the same time.

    A new pool takes the place of the target's last one, whose adapters are gone.

    Raises:
        ArgumentError: `target` takes no adapters, or `slots` is less than 1.
    """

    def __init__(self, target: object, slots: int = 8) -> None:
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
            raise ArgumentError(
                "AdapterPool slots",
                found=str(slots),
                expected="a whole number >= 1",
                next_step="Pass the number of adapters to hold at the same time.",
            )
        self._sites = cast("Mapping[str, Site]", sites)
        self._rows = rows
        self._slots = slots
        self._entries: dict[str, _Entry] = {}
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()
        rows.holder = weakref.ref(self)
        for site in self._sites.values():  # what a pool that had the place before has left there
            for slot in range(slots):
                site.drop(slot)

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
            PoolFullError: every slot is taken.
            FanfoldError: what read_adapter and bind raise.
        """
        _check_name(name)
        with self._lock:
            self._free_slot(name)  # before the files are read
        pairs = self._prepare(path)
        with self._lock:
            entry = _Entry(self._free_slot(name), Path(path), pairs)
            self._fill(entry, None)
            self._entries[name] = entry
        return entry.slot

    def replace(self, name: str, path: str | Path) -> int:
        """Puts another adapter in the place of a loaded one, under the same name and slot.

        A failed replacement leaves the old one in place.

        Returns:
            The slot.

        Raises:
            UnknownAdapterError: no adapter has that name.
            AdapterBusyError: it is in use.
            FanfoldError: what read_adapter and bind raise.
        """
        with self._lock:
            self._idle_entry(name)
        pairs = self._prepare(path)
        with self._lock:
            old = self._idle_entry(name)
            entry = _Entry(old.slot, Path(path), pairs)
            self._fill(entry, old)
            self._entries[name] = entry
        return entry.slot

    def unload(self, name: str) -> None:
        """Drops an adapter and frees its slot.

        Raises:
            UnknownAdapterError: no adapter has that name.
            AdapterBusyError: it is in use.
        """
        with self._lock:
            entry = self._idle_entry(name)
            for path in entry.pairs:
                self._sites[path].drop(entry.slot)
            del self._entries[name]

    def names(self) -> list[str]:
        """The loaded adapters, by slot."""
        with self._lock:
            return sorted(self._entries, key=lambda name: self._entries[name].slot)

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
        used = _checked_names(names)
        taken = set(used) - {BASE}
        with self._lock:
            slots = [-1 if name == BASE else self._entry(name).slot for name in used]
            self._users.update(taken)
        outer = self._rows.slots
        self._rows.set(slots)
        try:
            yield
        finally:
            self._rows.set(outer)
            with self._lock:
                self._users.subtract(taken)

    def info(self) -> list[dict[str, object]]:
        """The loaded adapters by slot, for people and for JSON.

        Each with: name, slot, path, ranks and scales (ascending), targets (how many pairs for gate, up, down
        and linear modules), bytes (resident, in the dtype of the model).
        """
        with self._lock:
            entries = sorted(self._entries.items(), key=lambda item: item[1].slot)
        return [
            {"name": name, "slot": entry.slot, "path": str(entry.path), **described(entry.pairs)}
            for name, entry in entries
        ]

    def _prepare(self, path: str | Path) -> dict[str, Pairs]:
        # a single layer holds one part of a model, and of an adapter
        sites = list(self._sites.values())
        single_layer = len(sites) == 1 and isinstance(sites[0], ExpertSite)
        try:
            bound = bind(read_adapter(path), self._sites, partial=single_layer)
            return {at: convert(pairs, self._sites[at]) for at, pairs in bound.items()}
        except FanfoldError as error:
            raise of_file(error, str(path)) from error

    def _fill(self, entry: _Entry, old: _Entry | None) -> None:
        before: Mapping[str, Pairs] = {} if old is None else old.pairs
        try:
            for path, pairs in entry.pairs.items():
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
            raise ArgumentError(
                "AdapterPool",
                found="a pool whose place another has taken",
                expected="the last pool made for this model or layer",
                next_step="Use that one, and load the adapters there.",
            )

    def _free_slot(self, name: str) -> int:
        self._check_holder()
        if name in self._entries:
            raise AdapterExistsError(
                f"adapter {name!r}",
                found="an adapter of that name",
                expected="a new name",
                next_step="Use replace() to put another adapter in its place, or unload() it first.",
            )
        free = set(range(self._slots)) - {entry.slot for entry in self._entries.values()}
        if not free:
            raise PoolFullError(
                f"adapter {name!r}",
                found=f"all {self._slots} slots taken by {', '.join(self._entries)}",
                expected="a free slot",
                next_step="unload() one of them, or make the pool with more slots.",
            )
        return min(free)

    def _entry(self, name: str) -> _Entry:
        self._check_holder()
        if name not in self._entries:
            raise UnknownAdapterError(
                f"adapter {name!r}",
                found=f"loaded are {', '.join(self._entries) or 'none'}",
                expected="the name of a loaded adapter",
                next_step="load() it first.",
            )
        return self._entries[name]

    def _idle_entry(self, name: str) -> _Entry:
        entry = self._entry(name)
        if self._users[name] > 0:
            raise AdapterBusyError(
                f"adapter {name!r}",
                found="a using block that runs with it",
                expected="an adapter that no row uses",
                next_step="Leave the block first, or load the new one under another name.",
            )
        return entry


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or name == BASE:
        raise ArgumentError(
            "adapter name",
            found=repr(name),
            expected=f"a text that is not empty and not {BASE!r}, which means no adapter",
            next_step="Choose another name.",
        )


def _checked_names(names: object) -> list[str]:
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    entries = [BASE if entry is None else entry for entry in cast("Sequence[object]", names if is_list else [])]
    checked = [entry for entry in entries if isinstance(entry, str)]
    if not is_list or len(checked) != len(entries):
        raise ArgumentError(
            "using names",
            found=repr(cast("object", names)),
            expected="a list with a name or None for each row",
            next_step="Pass [name] for a batch of one row.",
        )
    return checked
