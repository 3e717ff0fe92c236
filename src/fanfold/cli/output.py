"""How the commands print: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fanfold.errors import FanfoldError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

BASE = "base"  # how a row without an adapter is written


def print_json(value: Any) -> None:
    """One JSON value on standard output; JSON has no infinity and no NaN: null."""
    typer.echo(json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False))


def finite(value: Any) -> Any:
    """The same value, with None for numbers that are infinite or NaN."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def human_bytes(count: int) -> str:
    """E.g. `1.6 MB`; decimal units."""
    return decimal(count)


def grid(rows: list[tuple[str, str | Text]], indent: int = 2) -> Table:
    """Two aligned columns: a dim label, and what it says."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=indent)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row("", label, value if isinstance(value, Text) else Text(value))
    return table


@contextmanager
def errors_reported(as_json: bool = False) -> Generator[None]:
    """Prints a FanfoldError's parts, as JSON on standard output too if asked, and exits with 2."""
    try:
        yield
    except FanfoldError as error:
        if as_json:
            print_json(error.as_dict())
        err.print(Text.assemble(("error: ", "bold red"), (error.what, "red")), soft_wrap=True)
        err.print(grid([("found", error.found), ("expected", error.expected), ("next", error.next_step)]))
        raise typer.Exit(2) from None


def show_warning(message: Warning | str, *_: Any) -> None:
    """A warning on standard error, without the place in the source."""
    err.print(Text.assemble(("warning: ", "bold yellow"), str(message)), soft_wrap=True)


@contextmanager
def progress_bar(patience_s: float = 1.0) -> Generator[Callable[[int, int, str], None]]:
    """Gives a callable (done, total, what) that draws a bar, but only once a second has gone by."""
    bar = Progress(
        TextColumn("[dim]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
    task = bar.add_task("", total=None)
    start = time.monotonic()

    def update(done: int, total: int, what: str) -> None:
        bar.update(task, completed=done, total=total, description=what)
        if err.is_terminal and not bar.live.is_started and time.monotonic() - start > patience_s:
            bar.start()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()
