"""What a pool refuses."""

from __future__ import annotations

from collections.abc import Sequence

from fanfold.errors import (
    AdapterBusyError,
    AdapterExistsError,
    ArgumentError,
    PoolFullError,
    UnknownAdapterError,
)


def size(name: str, found: int, expected: str, what: str) -> ArgumentError:
    """A size of the pool itself."""
    return ArgumentError(f"AdapterPool {name}", found=str(found), expected=expected, next_step=f"Pass the {what}.")


def displaced() -> ArgumentError:
    """A pool whose model has a newer one."""
    return ArgumentError(
        "AdapterPool",
        found="a pool whose place another has taken",
        expected="the last pool made for this model or layer",
        next_step="Use that one, and load the adapters there.",
    )


def exists(name: str) -> AdapterExistsError:
    """A name that is taken."""
    return AdapterExistsError(
        f"adapter {name!r}",
        found="an adapter of that name",
        expected="a new name",
        next_step="Use replace() to put another adapter in its place, or unload() it first.",
    )


def full(name: str, slots: int, names: Sequence[str]) -> PoolFullError:
    """No slot for another adapter."""
    return PoolFullError(
        f"adapter {name!r}",
        found=f"all {slots} slots taken by {', '.join(names)}",
        expected="a free slot",
        next_step="unload() one of them, or make the pool with more slots or with evict=True.",
    )


def unknown(name: str, names: Sequence[str]) -> UnknownAdapterError:
    """A name that no adapter has."""
    return UnknownAdapterError(
        f"adapter {name!r}",
        found=f"loaded are {', '.join(names) or 'none'}",
        expected="the name of a loaded adapter",
        next_step="load() it first.",
    )


def busy(name: str) -> AdapterBusyError:
    """An adapter that rows run with."""
    return AdapterBusyError(
        f"adapter {name!r}",
        found="a using block that runs with it",
        expected="an adapter that no row uses",
        next_step="Leave the block first, pass wait=True, or load the new one under another name.",
    )
