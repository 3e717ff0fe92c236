"""NAME=VALUE arguments: adapters and prompts."""

from __future__ import annotations

import sys
from pathlib import Path

from fanfold.cli.output import BASE
from fanfold.errors import AdapterExistsError, ArgumentError, UnknownAdapterError


def adapter_folders(pairs: list[str]) -> dict[str, Path]:
    """Folder of each adapter by name, from `--adapter NAME=DIR`.

    Raises:
        ArgumentError: a pair without `=`, without a name or a folder, or named `base`.
        AdapterExistsError: a name given twice.
    """
    folders: dict[str, Path] = {}
    for pair in pairs:
        name, folder = split_pair("--adapter", pair, "NAME=DIR")
        if not folder:
            raise malformed("--adapter", pair, "NAME=DIR")
        if name == BASE:
            raise ArgumentError(
                "--adapter",
                found=repr(pair),
                expected=f"another name: {BASE} means the model without an adapter",
                next_step="Give the adapter another name.",
            )
        if name in folders:
            raise AdapterExistsError(
                "--adapter",
                found=f"{name} twice, as {folders[name]} and {folder}",
                expected="one folder a name",
                next_step="Give one of the two another name.",
            )
        folders[name] = Path(folder)
    return folders


def prompt_rows(pairs: list[str], names: list[str]) -> list[tuple[str | None, str]]:
    """(adapter or None, text) of each row, from `--prompt NAME=TEXT`; `-` stands for the lines of standard input.

    Raises:
        ArgumentError: a pair without `=` or without a name.
        UnknownAdapterError: a name that is none of `names`.
    """
    lines: list[str] = []
    for pair in pairs:
        lines += [line for line in sys.stdin.read().splitlines() if line.strip()] if pair == "-" else [pair]
    rows: list[tuple[str | None, str]] = []
    for line in lines:
        name, text = split_pair("--prompt", line, "NAME=TEXT")
        if name != BASE and name not in names:
            raise UnknownAdapterError(
                f"--prompt {line!r}",
                found=f"adapter {name}",
                expected=f"one of {', '.join([BASE, *names])}",
                next_step=f"Add --adapter {name}=DIR, or write {BASE}=TEXT for the model without an adapter.",
            )
        rows.append((None if name == BASE else name, text))
    return rows


def split_pair(option: str, pair: str, form: str) -> tuple[str, str]:
    """Name and value around the first `=`.

    Raises:
        ArgumentError: there is no `=`, or nothing in front of it.
    """
    name, equals, value = pair.partition("=")
    if not equals or not name.strip():
        raise malformed(option, pair, form)
    return name.strip(), value


def malformed(option: str, pair: str, form: str) -> ArgumentError:
    """The error of a pair that is not of that form."""
    return ArgumentError(
        option,
        found=repr(pair),
        expected=form,
        next_step=f"Write it as {form}; NAME is {BASE} for the model without an adapter."
        if form == "NAME=TEXT"
        else f"Write it as {form}, e.g. alice=adapters/alice.",
    )
