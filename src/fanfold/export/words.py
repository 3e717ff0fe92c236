"""Choices that are words, and their numbers in C. A number never changes: new words go to the end."""

from __future__ import annotations

from collections.abc import Mapping

from fanfold.export.description import ACTIVATIONS, DTYPES, PROJECTIONS
from fanfold.export.functions import weights

WORDS: Mapping[str, tuple[str, ...]] = {
    "dtype": DTYPES,
    "format": tuple(name for names in weights.FORMATS.values() for name in names),
    "activation": ACTIVATIONS,
    "projection": PROJECTIONS,
}


def number(choice: str, value: str | int) -> int:
    """What C calls a value of a choice."""
    return value if isinstance(value, int) else WORDS[choice].index(value)


def constant(choice: str, word: str) -> str:
    """The name of a word in C, e.g. FANFOLD_FORMAT_GPTQ4_G128."""
    return f"FANFOLD_{choice}_{word}".upper().replace("-", "_")
