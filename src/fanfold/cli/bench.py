"""`fanfold bench`: how fast an expert layer is, once it is known to be right."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.bench_model import batch_sizes, bench_model, print_paces
from fanfold.cli.bench_rows import append, read
from fanfold.cli.output import err, errors_reported, human_bytes, out, print_json, progress_bar
from fanfold.cli.pairs import adapter_folders
from fanfold.errors import ArgumentError


class RoutingName(StrEnum):
    """How tokens choose experts."""

    UNIFORM = "uniform"
    BALANCED = "balanced"
    POWER = "power"
    HOT = "hot"


class ModeName(StrEnum):
    """How calls are made."""

    GRAPH = "graph"
    EAGER = "eager"


class PopularityName(StrEnum):
    """Which adapters tokens have."""

    IDENTICAL = "identical"
    UNIFORM = "uniform"
    SKEWED = "skewed"
    DISTINCT = "distinct"
    NONE = "none"


class DeviceName(StrEnum):
    """Where the layer runs."""

    CUDA = "cuda"
    CPU = "cpu"


def bench(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|E,k,H,I",
            help="qwen3-30b, mixtral-8x7b, deepseek-v3/8, gpt-oss-120b, qwen3-next, or sizes. Repeatable.",
            show_default="qwen3-30b",
        ),
    ] = None,
    weight_format: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="NAME|all",
            help="As `fanfold inspect` prints it. Repeatable.",
            show_default="gptq4-g128",
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="T,T,...", help="Tokens of a call.")] = "1,16,256,4096",
    routing: Annotated[
        RoutingName,
        typer.Option(
            help="Experts equally likely, equally loaded, the n-th with a weight of 1/n, or one in all tokens."
        ),
    ] = RoutingName.UNIFORM,
    adapters: Annotated[
        int, typer.Option(min=0, metavar="N", help="Adapters on all experts; tokens have one each.")
    ] = 0,
    rank: Annotated[int, typer.Option(min=1, max=512, metavar="R", help="Of the adapters.")] = 16,
    popularity: Annotated[
        PopularityName,
        typer.Option(help="All tokens have one adapter, any, the n-th with a weight of 1/n, each another, or none."),
    ] = PopularityName.UNIFORM,
    implementation: Annotated[str, typer.Option(metavar="NAME", help="auto, or one by name.")] = "auto",
    mode: Annotated[ModeName, typer.Option(help="On a GPU: calls in a CUDA graph, or eager ones.")] = ModeName.GRAPH,
    device: Annotated[
        DeviceName | None, typer.Option(help="Where to run.", show_default="cuda where there is one")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT|NAME",
            help="A whole model, beside transformers' own experts; qwen3-30b: of random weights.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="With --model NAME: how many of its layers.", show_default="all"),
    ] = None,
    batch: Annotated[
        str, typer.Option(metavar="B[xP],...", help="With --model: rows of a batch, and tokens of a row.")
    ] = "1,4",
    prompt: Annotated[int, typer.Option(min=1, help="With --model: tokens of a row where --batch has none.")] = 64,
    new: Annotated[int, typer.Option(min=1, help="With --model: decode steps to time.")] = 16,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="With --model: rows have these in turn.", show_default=False),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="JSONL file, appended to.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write roofline pictures there (SVG and PNG, light and dark).", show_default=False
        ),
    ] = None,
    drawn: Annotated[
        Path | None,
        typer.Option(
            "--rows", metavar="FILE", help="Time nothing: show the rows of an --out file.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time an expert layer of random weights, or a model; a figure that fails its check is not printed, and exits 1."""
    if model is not None:
        with errors_reported(as_json):
            paces = bench_model(
                model,
                batches=batch_sizes(batch, prompt),
                new=new,
                adapters=adapter_folders(adapter or []),
                formats=weight_format or ["gptq4-g128"],
                layers=layers,
                random_adapters=adapters,
                rank=rank,
                device=None if device is None else device.value,
            )
            if file is not None:
                for pace in paces:
                    append(file, pace)
        if as_json:
            print_json(paces)
        else:
            print_paces(paces)
        if any(pace["refused"] and pace["difference"] is not None for pace in paces):
            raise typer.Exit(1)
        return
    with errors_reported(as_json):
        from fanfold.bench.cell import Settings
        from fanfold.bench.jobs import layer_shape, weight_formats
        from fanfold.bench.machine import device_named
        from fanfold.bench.run import bench as bench_cells

        shapes = [layer_shape(name) for name in shape or ["qwen3-30b"]]
        formats = [fmt for name in weight_format or ["gptq4-g128"] for fmt in weight_formats(name)]
        counts = token_counts(tokens)
        settings = Settings(
            device_named(None if device is None else device.value),
            routing=routing.value,
            implementation=implementation,
            adapters=adapters,
            rank=rank,
            popularity=popularity.value,
            mode=mode.value,
        )
        rows: list[dict[str, Any]] = [] if drawn is None else read(drawn, shape, weight_format)
        if drawn is None:
            with progress_bar() as progress:
                for cell in bench_cells(shapes, formats, counts, settings, progress):
                    rows.append(cell.row())
                    if file is not None:
                        append(file, rows[-1])
        pictures: list[Path] = []
        if plot is not None:
            from fanfold.bench.plot import plot as plot_rows

            pictures = plot_rows(rows, plot)
    if as_json:
        print_json(rows)
    else:
        print_rows(rows)
        if pictures:
            out.print(Text(f"Pictures: {', '.join(str(path) for path in pictures)}"), soft_wrap=True)
    if any(row["refused"] for row in rows):
        raise typer.Exit(1)


def token_counts(text: str) -> list[int]:
    """The numbers of `1,16,256`.

    Raises:
        ArgumentError: something else, or a number below 1.
    """
    parts = text.split(",")
    counts = [int(part) for part in parts if part.strip().isdecimal()]
    if len(counts) != len(parts) or min(counts) < 1:
        raise ArgumentError(
            "--tokens",
            found=repr(text),
            expected="numbers from 1 on, with commas between them",
            next_step="E.g. --tokens 1,16,256.",
        )
    return counts


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Where it ran and how it was timed, a table a layer, and what is wrong with the cells that have no figure."""
    first = rows[0]
    how = f"{first['dtype']}, {first['routing']} routing, {adapters_of(first)}medians of {first['timing']}"
    out.print(Text.assemble((first["gpu"] or first["machine"], "bold"), (f"  {how}", "dim")), soft_wrap=True)
    for shape, cells in groupby(rows, key=lambda row: str(row["shape"])):
        of_shape = list(cells)
        out.print(table_of(shape, of_shape))
        if loads := loads_of(of_shape):
            out.print(Text(loads, "dim"))
    timed = [row for row in rows if not row["refused"]]
    if timed and first["device"] == "cuda":
        between = min((row["copies"] - 1) * row["weight_bytes"] for row in timed)
        out.print(Text(f"At least {human_bytes(int(between))} of other weights between two reads of one.", "dim"))
    for row in rows:
        if row["refused"]:
            where = f"{row['shape']} {row['format']} {row['tokens']} tokens: "
            err.print(Text.assemble(("no figure: ", "bold red"), where, row["refused"]), soft_wrap=True)


def adapters_of(row: dict[str, Any]) -> str:
    """Words for the adapters, where there are any."""
    count: int = row["adapters"]
    return f"{count} adapters of rank {row['rank']} ({row['popularity']}), " if count else ""


def loads_of(rows: Sequence[dict[str, Any]]) -> str:
    """The experts met and the load, by tokens; they are the same for every format."""
    found = {row["tokens"]: row for row in rows if row.get("load") is not None}  # rows of schema 1 have none
    parts = [f"{tokens}: {row['experts_met']:.4g}, {row['load']:.3g}" for tokens, row in found.items()]
    return f"Tokens: experts met, most rows of one over the mean. {'; '.join(parts)}" if parts else ""


def table_of(shape: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A line a cell, beside the format and what ran it; floors only where they are known."""
    floors = any(row["floor_us"] is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.title, table.title_justify, table.title_style = shape, "left", "bold cyan"
    table.add_column("format", overflow="fold")
    for name in ("tokens", "us", "20-80", *(("floor", "x") if floors else ()), "TFLOP/s", "GB/s", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, group in groupby(rows, key=lambda row: str(row["format"])):
        cells = list(group)
        beside = [Text(name), Text(cells[0]["implementation"] or "", "dim")]
        for index, row in enumerate(cells):
            last = index == len(cells) - 1
            words = Text("\n").join(beside[index:]) if last else beside[index] if index < len(beside) else Text()
            table.add_row(words, str(row["tokens"]), *figures(row, floors))
    return table


def figures(row: dict[str, Any], floors: bool) -> list[str | Text]:
    """The numbers of one line: median, spread of the middle 60 % over the median, floor, rates, verified error."""
    us = row["median_us"]
    known = us is not None and "p80_us" in row  # not in rows of schema 1
    spread = f"{(row['p80_us'] - row['p20_us']) / us:.0%}" if known else ""
    ratio = "" if row["over_floor"] is None else f"{row['over_floor']:.2f}"
    return [
        Text("refused", "bold red") if row["refused"] else Text(number(us), "bold"),
        spread,
        *([number(row["floor_us"]), ratio] if floors else []),
        number(row["teraflops"]),
        number(row["gigabytes_per_second"]),
        "" if row["error"] is None else f"{row['error']:.1e}",
    ]


def number(value: float | None) -> str:
    """Two or three digits, or all before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
