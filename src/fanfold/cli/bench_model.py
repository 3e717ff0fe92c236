"""`fanfold bench --model`: a whole model, with fanfold's experts and with transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import human_bytes, out, progress_bar
from fanfold.errors import ArgumentError


def bench_model(model: str, **options: Any) -> list[dict[str, Any]]:
    """The rows of `throughput`, behind a progress bar."""
    from fanfold.throughput import throughput

    with progress_bar() as progress:
        return list(throughput(model, **options, progress=progress))


def batch_sizes(text: str, prompt: int) -> list[tuple[int, int]]:
    """The (rows, tokens a row) of `1,16,8x2048`; without an x, `prompt` tokens.

    Raises:
        ArgumentError: something else, or a number below 1.
    """
    found: list[tuple[int, int]] = []
    for part in text.split(","):
        rows, cross, tokens = part.partition("x")
        if not rows.strip().isdecimal() or (cross and not tokens.strip().isdecimal()):
            raise _malformed(text)
        found.append((int(rows), int(tokens) if cross else prompt))
    if min(size for batch in found for size in batch) < 1:
        raise _malformed(text)
    return found


def _malformed(text: str) -> ArgumentError:
    return ArgumentError(
        "--batch",
        found=repr(text),
        expected="numbers of rows from 1 on, or ROWSxTOKENS, with commas between them",
        next_step="E.g. --batch 1,16,8x2048.",
    )


def print_paces(rows: Sequence[dict[str, Any]]) -> None:
    """Where it ran, a table a model, and why some have no figure."""
    first = rows[0]
    adapters = f", adapters in turn: {first['adapters']}" if first["adapters"] else ""
    how = f"{first['dtype']}, {first['new']} decode steps{adapters}"
    out.print(Text.assemble((first["gpu"] or first["machine"], "bold"), (f"  {how}", "dim")), soft_wrap=True)
    for title, of_model in groupby(rows, key=title_of):
        out.print(table_of(title, list(of_model)))
    for reason in dict.fromkeys(words for row in rows for words in reasons(row)):
        out.print(Text(reason, "dim"), soft_wrap=True)


def title_of(row: dict[str, Any]) -> str:
    """The model, and how many layers of random weights."""
    layers: int | None = row["layers"]
    return str(row["model"]) if layers is None else f"{row['model']}, {layers} layers of random weights"


def table_of(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    """A line an experts' implementation and batch; steps of a graph only where there are some."""
    graphs = any(row["graph_ms"] is not None for row in rows)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.title, table.title_justify, table.title_style = title, "left", "bold cyan"
    table.add_column("experts")
    table.add_column("weights")
    columns = ("batch", "prefill ms", "step ms", *(("graph ms",) if graphs else ()), "tokens/s", "memory")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if not row["refused"]:
            step = ("decode_ms", "graph_ms") if graphs else ("decode_ms",)
            figures = [number(row[name]) for name in ("prefill_ms", *step)]
            best = number(row["graph_tokens_per_second"] or row["tokens_per_second"])
            memory = "" if row["peak_bytes"] is None else human_bytes(row["peak_bytes"])
            batch = f"{row['batch']}x{row['prompt']}"
            table.add_row(row["experts"], row["weights"], batch, *figures, best, memory)
    return table


def reasons(row: dict[str, Any]) -> list[str]:
    """Why a row has no figures, or none of a graph."""
    name = row["experts"]
    if row["refused"]:
        return [f"{name}: no figure, {row['refused']}"]
    return [f"{name}: no graph, {row['graph_refused']}"] if row["graph_refused"] else []


def number(value: float | None) -> str:
    """Four digits; nothing for None."""
    return "" if value is None else f"{value:,.4g}"
