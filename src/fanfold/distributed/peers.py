"""Peers: the ranks of a group, what they have to agree on, and who is at fault where they can't go on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore

from fanfold.distributed import pulse
from fanfold.distributed.pulse import BEAT, Pulse
from fanfold.errors import RankError, UnavailableError

LONGEST = 400
_PEERS: dict[ProcessGroup, Peers] = {}
Report = dict[str, Any]


def peers_of(group: ProcessGroup | None = None) -> Peers:
    """The ranks of a group, one object a group.

    Args:
        group: None for all ranks.

    Raises:
        UnavailableError: torch.distributed has not been initialised.
    """
    if group is None:
        if not dist.is_initialized():
            raise UnavailableError(
                "process group",
                found="torch.distributed without a process group",
                expected="one process a rank, with torch.distributed.init_process_group called",
                next_step="Start the script with torchrun and call torch.distributed.init_process_group() first.",
            )
        group = cast("ProcessGroup", dist.group.WORLD)
    if group not in _PEERS:
        _PEERS[group] = Peers(group)
    return _PEERS[group]


class Peers:
    """The ranks of a group. What they agree on goes through the group's store, never through its collectives.

    Waiting ends after the store's timeout, which is the one given to init_process_group, or pulse.QUIET seconds after a
    rank has gone.

    Attributes:
        group: of torch.distributed.
        rank: this one, within the group.
        size: how many there are.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self._store = PrefixStore("fanfold", group.get_group_store())
        self._patience: float = cast("Any", self._store).timeout.total_seconds()
        self._pulse = Pulse(self._store, self.rank, self.size)
        self._lock = threading.Lock()
        self._step = 0

    @contextmanager
    def together(self, what: str, **facts: str) -> Generator[None]:
        """What is done inside the block is done by all ranks, or fails on all.

        Args:
            what: is done, the same on all ranks.
            facts: name -> what has to be the same on all ranks.

        Raises:
            RankError: another rank has failed, is gone, does something else, or has other facts; says which.
            Exception: what was raised inside the block, on the rank that raised it.
        """
        try:
            yield
        except Exception as error:
            with suppress(RankError):  # what went wrong here comes first
                self.agree(what, facts, error)
            raise
        self.agree(what, facts, None)

    def agree(self, what: str, facts: Mapping[str, str], failure: Exception | None) -> None:
        """Tells all ranks what this one found, and waits for what they found; see `together`."""
        with self._lock:
            step, self._step = self._step, self._step + 1
            own: Report = {"what": what, "facts": dict(facts), "failure": None if failure is None else shown(failure)}
            with self.naming(what):
                self._store.set(f"{step}/{self.rank}", json.dumps(own))
                self._wait(step, what)
                reports = [json.loads(self._store.get(f"{step}/{rank}")) for rank in range(self.size)]
                if step:  # who has come here has read all of the step before
                    self._store.delete_key(f"{step - 1}/{self.rank}")
        if failure is None:
            _compare(what, reports)

    @contextmanager
    def naming(self, what: str) -> Generator[None]:
        """Inside, ranks work together; where that breaks down, the error says which rank is at fault.

        Raises:
            RankError: an error of torch.distributed, or a connection that broke.
        """
        try:
            yield
        except RankError as error:
            self._note(error)
            raise
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or _of_transport(error):
                failure = self._survey(what, error)
                self._note(failure)
                raise failure from error
            raise

    def _wait(self, step: int, what: str) -> None:
        """Until every rank has reported.

        Raises:
            RankError: a rank is gone, or has not come here within the store's timeout.
        """
        ends = time.monotonic() + self._patience
        missing = list(range(self.size))
        while True:
            try:
                self._store.wait([f"{step}/{rank}" for rank in missing], timedelta(seconds=BEAT))
                return
            except dist.DistStoreError:  # the wait has ended
                missing = [rank for rank in missing if not self._store.check([f"{step}/{rank}"])]
            gone = [rank for rank in self._pulse.gone() if rank in missing]
            if gone:
                raise _gone(what, gone)
            if missing and time.monotonic() > ends:
                raise RankError(
                    what,
                    found=f"{_named(missing)} elsewhere after {self._patience:g} s",
                    expected=f"all {self.size} ranks to come here",
                    next_step="Make the same calls in the same order on every rank, or give init_process_group "
                    "a longer timeout.",
                )

    def _survey(self, what: str, error: Exception) -> RankError:
        """Who is at fault for a broken collective: by the notes of others, else by the ranks without a sign of life."""
        try:
            ends = time.monotonic() + pulse.QUIET + 2 * BEAT
            while True:
                noted = [rank for rank in range(self.size) if self._store.check([f"failed/{rank}"])]
                if noted:
                    parts = json.loads(self._store.get(f"failed/{noted[0]}"))
                    return RankError(what, found=parts[0], expected=parts[1], next_step=parts[2])
                gone = self._pulse.gone()
                if gone:
                    return _gone(what, gone)
                if time.monotonic() > ends:
                    break
                time.sleep(BEAT)
        except RuntimeError:
            return RankError(
                what,
                found=f"rank 0 gone with the group's store ({shown(error)})",
                expected="all ranks",
                next_step="Look at the output of rank 0; then start all ranks again.",
            )
        return RankError(
            what,
            found=f"all ranks alive, and {shown(error)}",
            expected="the same call with tensors of the same sizes on every rank, in time",
            next_step="Pass all ranks the same batch (all_reduce), and call the layer on all of them.",
        )

    def _note(self, error: RankError) -> None:
        """Tells ranks that fail because this one ends what the cause was."""
        try:
            self._store.set(f"failed/{self.rank}", json.dumps([error.found, error.expected, error.next_step]))
        except RuntimeError:  # no store, no one to tell
            return


def shown(error: Exception) -> str:
    """Class and message, on one line and not too long."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _of_transport(error: RuntimeError) -> bool:
    """Whether a plain RuntimeError is one of gloo's."""
    return "/gloo/" in str(error) or "Gloo" in str(error)


def _compare(what: str, reports: list[Report]) -> None:
    failed = [(rank, report["failure"]) for rank, report in enumerate(reports) if report["failure"] is not None]
    if failed:
        raise RankError(
            what,
            found="; ".join(f"rank {rank} failed: {failure}" for rank, failure in failed[:4]),
            expected="every rank to succeed",
            next_step="Mend what that rank reports; nothing was changed on this one.",
        )
    names = dict.fromkeys(name for report in reports for name in report["facts"])
    for name, values in (
        ("call", [report["what"] for report in reports]),
        *((name, [report["facts"].get(name, "nothing") for report in reports]) for name in names),
    ):
        if len(set(values)) > 1:
            by_value: dict[str, list[int]] = {}
            for rank, value in enumerate(values):
                by_value.setdefault(value, []).append(rank)
            raise RankError(
                f"{what}: {name}",
                found="; ".join(f"{_named(ranks)}: {value}" for value, ranks in by_value.items()),
                expected="the same on every rank",
                next_step="Give all ranks the same files and arguments, and make the same calls in the same order.",
            )


def _gone(what: str, ranks: list[int]) -> RankError:
    return RankError(
        what,
        found=f"{_named(ranks)} gone: ended, or no sign of life for {pulse.QUIET:g} s",
        expected="all ranks",
        next_step="Look at the output of that rank; then start all ranks again.",
    )


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
