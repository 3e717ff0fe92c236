"""Names of adapters, as callers give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fanfold.errors import ArgumentError

BASE = "base"
"""The reserved name of no adapter."""


def check_name(name: object) -> None:
    """Whether an adapter may have this name.

    Raises:
        ArgumentError: it is no text, empty, or reserved.
    """
    if not isinstance(name, str) or not name or name == BASE:
        raise ArgumentError(
            "adapter name",
            found=repr(name),
            expected=f"a text that is not empty and not {BASE!r}, which means no adapter",
            next_step="Choose another name.",
        )


def checked_names(names: object) -> list[str]:
    """One name a row, BASE for None.

    Raises:
        ArgumentError: no list of names and None.
    """
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
