"""`fanfold tune`: faster configs of layers on this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.bench import token_counts
from fanfold.cli.output import err, errors_reported, out, print_json, progress_bar


def tune(
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|E,k,H,I", help="As for `fanfold bench`. Repeatable.", show_default="qwen3-30b"),
    ] = None,
    weight_format: Annotated[
        list[str] | None,
        typer.Option(
            "--format", metavar="NAME|all", help="As for `fanfold bench`. Repeatable.", show_default="gptq4-g128"
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="T,T,...", help="Tokens of a call; a row serves four times more or fewer.")
    ] = "1,16,64,256,1024,4096,16384",
    trials: Annotated[int, typer.Option(min=1, help="Candidates for each number of tokens.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look for faster configs of layers on this GPU, for tables that they then run with; broken off, it goes on."""
    rows: list[dict[str, Any]] = []
    with errors_reported(as_json):
        from fanfold.bench.jobs import layer_shape, weight_formats
        from fanfold.tune import tune as tune_layers

        shapes = [layer_shape(name) for name in shape or ["qwen3-30b"]]
        formats = [fmt for name in weight_format or ["gptq4-g128"] for fmt in weight_formats(name)]
        counts = token_counts(tokens)
        with progress_bar() as progress:
            for row in tune_layers(shapes, formats, counts, trials=trials, progress=progress):
                rows.append(row)
    if as_json:
        print_json(rows)
    else:
        print_rows(rows)
    if any(row["refused"] for row in rows):
        raise typer.Exit(1)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """A line a layer and number of tokens, the tables, and why some have no row."""
    out.print(Text.assemble((rows[0]["gpu"], "bold"), ("  medians of graph replays", "dim")), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    for name in ("tokens", "before", "us"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("configs", overflow="fold")
    for row in rows:
        if row["refused"]:
            continue
        chained = ", chained" if row["chained"] else ""
        more = "" if row["whole"] else f" (trials ran out: {row['trials']})"
        configs = f"{row['gate_up']}, {row['down']}{chained}{more}"
        figures = [f"{row[name]:,.1f}" for name in ("start_us", "us")]
        table.add_row(f"{row['shape']} {row['format']}", str(row["tokens"]), *figures, configs)
    out.print(table)
    for path in dict.fromkeys(row["path"] for row in rows if not row["refused"]):
        out.print(Text(f"Written to {path}"), soft_wrap=True)
    for row in rows:
        if row["refused"]:
            where = f"{row['shape']} {row['format']} {row['tokens']} tokens: "
            err.print(Text.assemble(("no row: ", "bold red"), where, row["refused"]), soft_wrap=True)
