"""Agreement: what processes that hold parts of one model do all together, or not at all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Protocol, cast


class Together(Protocol):
    """How the steps of a pool are made with those of other processes."""

    def __call__(self, what: str, folder: Path | None = None, /, **facts: str) -> AbstractContextManager[None]:
        """Leaving the block raises on every process where one has failed inside it.

        Args:
            what: is done.
            folder: of the adapter; its files have to be copies of each other.
            facts: name -> what has to be the same everywhere.
        """
        ...


def agreement_of(target: object) -> Together:
    """That of a model or layer which is spread over processes: its `together`. Others have no one to ask."""
    found: object = getattr(target, "together", None)
    return _alone if found is None else cast("Together", found)


def _alone(what: str, folder: Path | None = None, /, **facts: str) -> AbstractContextManager[None]:
    return nullcontext()
