"""Values from files, in messages and checks: whatever a damaged file holds, these neither fail nor flood a screen."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import cast

FETCH_AGAIN = "Fetch the file again, and compare its size and checksum with the source."
LONGEST_NAME = 500  # characters of a tensor's name
DEEPEST = 64  # levels of lists and objects; real configs have fewer than ten

_printer = reprlib.Repr()
_printer.maxstring = _printer.maxother = _printer.maxlong = 120
_printer.maxlist = _printer.maxdict = 8


def shown(value: object) -> str:
    """`repr` of a value, shortened."""
    return _printer.repr(value)


def key_shown(key: str) -> str:
    """A key of a file's object, as it is where it can be printed."""
    return key if sound_name(key) else shown(key)


def sound_name(name: str) -> bool:
    """Whether something can be called like that: short, and nothing in it that a terminal would act on."""
    return name.isprintable() and 0 < len(name) <= LONGEST_NAME


def too_deep(value: object) -> bool:
    """Whether lists and objects are nested more than DEEPEST levels."""
    level: list[object] = [value]
    for _ in range(DEEPEST):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()
