"""Journal: every trial as soon as it is done, so that a search that was broken off goes on where it was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ATTEMPTS = 2
"""Trials of one candidate that never came back (the process died) before it is left alone."""


@dataclass(frozen=True)
class Outcome:
    """Of one trial.

    Attributes:
        us: microseconds a call; None: no figure.
        refused: why not.
    """

    us: float | None
    refused: str | None = None


class Journal:
    """A JSONL file, two lines a trial: when it starts and when it is done.

    Args:
        path: the file; made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done: dict[str, Outcome] = {}
        self._started: Counter[str] = Counter()
        text = path.read_text() if path.exists() else ""
        for line in text.splitlines():
            self._take(line)
        if text and not text.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")

    def _take(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except ValueError:  # the process died while it wrote
            return
        key = _key(entry["job"], entry["candidate"])
        if "us" in entry:
            self._done[key] = Outcome(entry["us"], entry["refused"])
        self._started[key] += -1 if {"us", "interrupted"} & set(entry) else 1

    def outcome(self, job: Mapping[str, Any], candidate: Mapping[str, Any], trial: Callable[[], Outcome]) -> Outcome:
        """What is written of that trial; else what it comes to now, which is written.

        Args:
            job: layer, machine and versions.
            candidate: what is tried.
            trial: tries it.
        """
        key = _key(job, candidate)
        if key in self._done:
            return self._done[key]
        if self._started[key] >= ATTEMPTS:
            return Outcome(None, f"did not come back {ATTEMPTS} times")
        entry = {"job": job, "candidate": candidate}
        self._append(entry)
        self._started[key] += 1
        try:
            found = trial()
        except KeyboardInterrupt:
            self._append(entry | {"interrupted": True})  # no fault of the candidate
            raise
        self._append(entry | asdict(found))
        self._done[key] = found
        return found

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _key(job: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    return json.dumps([job, candidate], sort_keys=True)
