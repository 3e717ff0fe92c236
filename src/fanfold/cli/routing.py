"""`fanfold routing`: which experts a text uses, and what adapters change of that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import BASE, errors_reported, out, print_json, progress_bar
from fanfold.cli.pairs import adapter_folders
from fanfold.cli.routing_levels import LEVELS, level_of, relative_load
from fanfold.cli.routing_page import page
from fanfold.errors import ArgumentError

BARS = "\u00b7\u2581\u2582\u2583\u2584\u2585\u2586\u2588"
"""A character a level: a dot, then bars of growing height."""
WIDEST = 64
"""Most bars of a layer; more experts share them."""


def routing(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the model.", show_default=False)],
    text: Annotated[Path, typer.Option(metavar="FILE", help="What the model reads.", show_default=False)],
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Read it with this adapter too. Repeatable.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a page with heat maps.", show_default=False)
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="OUT", help="Write each token's experts, for `fanfold bench`.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which experts a text uses, layer by layer: their load, its balance, and what adapters change."""
    with errors_reported(as_json):
        folders = adapter_folders(adapter or [])
        for option, file in (("--html", html), ("--record", record)):
            if file is not None:
                check_writable(option, file)

        from fanfold.expert_usage import expert_usage

        with progress_bar() as progress:
            report = expert_usage(checkpoint, text, folders, record=record, progress=progress)
    if html is not None:
        html.write_text(page(report), encoding="utf-8")
    if as_json:
        print_json(report)
    else:
        print_report(report, html)


def check_writable(option: str, file: Path) -> None:
    """Before the work is done.

    Raises:
        ArgumentError: the file can't go there.
    """
    if file.is_dir() or not file.parent.is_dir():
        raise ArgumentError(
            option,
            found=f"{file}, a folder" if file.is_dir() else f"no folder {file.parent}",
            expected="a file in a folder that is there",
            next_step=f"E.g. {option} {file.name}, which goes into this folder.",
        )


def print_report(report: dict[str, Any], html: Path | None) -> None:
    """A table a run."""
    facts = f"  {report['model_type']}, {report['tokens']:,} tokens of {report['text']}"
    out.print(Text.assemble((report["path"], "bold"), (facts, "dim")), soft_wrap=True)
    for run in report["runs"]:
        out.print(table_of(run))
    steps = ", ".join(f"{bar} < {limit:g}" for bar, limit in zip(BARS[1:], LEVELS, strict=False))
    out.print(Text(f"Load over the mean: {BARS[0]} none, {steps}, {BARS[-1]} more.", "dim"))
    if html is not None:
        out.print(Text(f"Written to {html}", "dim"), soft_wrap=True)


def table_of(run: dict[str, Any]) -> Table:
    """A line a layer."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.title, table.title_justify, table.title_style = run["adapter"] or BASE, "left", "bold cyan"
    table.add_column("layer", justify="right")
    table.add_column("load of the experts", overflow="fold")
    adapted = run["adapter"] is not None
    for name in ("max/mean", "entropy", "effective", "unused", *(("changed", "moved") if adapted else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for layer in run["layers"]:
        cells = [
            str(layer["layer"]),
            bars(layer["counts"]),
            f"{layer['max_over_mean']:.2f}",
            f"{layer['entropy']:.2f}",
            f"{layer['effective']:.1f}",
            str(layer["unused"]),
        ]
        table.add_row(*cells, *([f"{layer['changed']:.1%}", f"{layer['moved']:.1%}"] if adapted else []))
    return table


def bars(counts: list[int]) -> str:
    """A bar an expert, or for as many experts as it takes to have no more than WIDEST."""
    together = -(-len(counts) // WIDEST)
    loads = relative_load(counts)
    groups = [loads[first : first + together] for first in range(0, len(loads), together)]
    return "".join(BARS[level_of(sum(group) / len(group))] for group in groups)
