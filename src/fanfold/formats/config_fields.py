"""Fields: typed access to one object of a quantiser's config."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fanfold.errors import ConfigError, UnsupportedError
from fanfold.formats.values import key_shown, shown
from fanfold.spec.weight_format import INTEGER_BITS, Kind

LARGEST = 2**31 - 1  # of a group or block; far above any matrix


@dataclass(frozen=True)
class Fields:
    """One object of a config; `where` names it in messages. A field that is null counts as absent."""

    where: str
    values: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return self.values.get(name) is not None

    def integer(self, name: str) -> int:
        """A whole number."""
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(name, "a whole number")
        return value

    def bits(self, name: str, kind: Kind) -> int:
        """A bit width that the integer format has."""
        value = self.integer(name)
        if value not in INTEGER_BITS[kind]:
            raise self.unsupported(name, " or ".join(map(str, INTEGER_BITS[kind])))
        return value

    def group_size(self) -> int:
        """`group_size`: positive, or -1 for one group over all of K."""
        value = self.integer("group_size")
        if value != -1 and not 0 < value <= LARGEST:
            raise self.error("group_size", "a positive number, or -1 for one group over all of K")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def names(self, *names: str) -> list[str]:
        """The first of these fields that is there, as a list of strings; empty where none is."""
        for name in names:
            if not self.has(name):
                continue
            value = self.values[name]
            if not isinstance(value, list) or not all(isinstance(v, str) for v in cast(list[Any], value)):
                raise self.error(name, "a list of module names")
            return cast(list[str], value)
        return []

    def block(self, name: str) -> tuple[int, int]:
        """Rows and columns that share a scale: `[128, 128]`, or `"128x128"`."""
        value: object = self.values.get(name)
        if isinstance(value, str):
            value = [int(part) if part.isascii() and part.isdigit() else part for part in value[:32].split("x")]
        sizes = cast(Sequence[object], value if isinstance(value, list) else ())
        whole = all(isinstance(size, int) and not isinstance(size, bool) and 0 < size <= LARGEST for size in sizes)
        if len(sizes) != 2 or not whole:
            raise self.error(name, "two positive numbers, rows and columns")
        rows, columns = cast(Sequence[int], sizes)
        return rows, columns

    def object(self, name: str) -> Fields:
        """An object inside."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(self._at(name), cast(dict[str, Any], value))

    def pattern(self, field: str, text: str) -> re.Pattern[str]:
        """A regular expression that stands in `field`."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of syntax that later Pythons may read otherwise
                return re.compile(text)
        except (re.error, ValueError, RecursionError, OverflowError) as error:
            raise ConfigError(
                self._at(field),
                found=f"{shown(text)} ({shown(str(error))})",
                expected="a regular expression",
                next_step="Correct the quantization config, or fetch it again.",
            ) from error

    def error(self, name: str, expected: str) -> ConfigError:
        """What to raise for a field that is not what it should be."""
        return ConfigError(
            self._at(name),
            found=shown(self.values.get(name)),
            expected=expected,
            next_step="Correct the quantization config, or fetch it again.",
        )

    def unsupported(self, name: str, expected: str) -> UnsupportedError:
        """What to raise for a field that means something fanfold does not run."""
        return UnsupportedError(
            self._at(name),
            found=shown(self.values.get(name)),
            expected=expected,
            next_step="Requantise the model to one of the formats in fanfold's README.",
        )

    def _at(self, name: str) -> str:
        return f"{self.where}.{key_shown(name)}"
