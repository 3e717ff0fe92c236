"""The table of `fanfold bench`: a line a cell."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import err, human_bytes, out


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
    if peers := peers_of(rows):
        words = ", ".join(short(name) for name in peers)
        out.print(Text(f"{words}: times over fanfold's on the same weights, dense, timed in rotation.", "dim"))
    for line in refused_peers(rows):
        out.print(Text(line, "dim"), soft_wrap=True)
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
    """A line a cell, beside the format and what ran it; floors only where they are known, peers instead of rates."""
    floors = any(row["floor_us"] is not None for row in rows)
    peers = peers_of(rows)
    rates = [short(name) for name in peers] or ["TFLOP/s", "GB/s"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    table.title, table.title_justify, table.title_style = shape, "left", "bold cyan"
    table.add_column("format", overflow="fold")
    spread, error = ((), ()) if peers else (("20-80",), ("error",))
    for name in ("tokens", "us", *spread, *(("floor", "x") if floors else ()), *rates, *error):
        table.add_column(name, justify="right", no_wrap=True)
    for name, group in groupby(rows, key=lambda row: str(row["format"])):
        cells = list(group)
        beside = [Text(name), Text(cells[0]["implementation"] or "", "dim")]
        for index, row in enumerate(cells):
            last = index == len(cells) - 1
            words = Text("\n").join(beside[index:]) if last else beside[index] if index < len(beside) else Text()
            table.add_row(words, str(row["tokens"]), *figures(row, floors, peers))
    return table


def figures(row: dict[str, Any], floors: bool, peers: Sequence[str]) -> list[str | Text]:
    """The numbers of one line: median, spread of the middle 60 % over it, floor, rates, error; or peers instead."""
    us = row["median_us"]
    known = us is not None and "p80_us" in row  # not in rows of schema 1
    spread = f"{(row['p80_us'] - row['p20_us']) / us:.0%}" if known else ""
    ratio = "" if row["over_floor"] is None else f"{row['over_floor']:.2f}"
    return [
        Text("refused", "bold red") if row["refused"] else Text(number(us), "bold"),
        *([] if peers else [spread]),
        *([number(row["floor_us"]), ratio] if floors else []),
        *(ratios(row, peers) or [number(row["teraflops"]), number(row["gigabytes_per_second"])]),
        *([] if peers else ["" if row["error"] is None else f"{row['error']:.1e}"]),
    ]


def number(value: float | None) -> str:
    """Two or three digits, or all before the point; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def peers_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the peers, in order; rows before schema 3 have none."""
    return list(dict.fromkeys(peer["name"] for row in rows for peer in row.get("peers", ())))


def short(name: str) -> str:
    """The head of a peer's column: `grouped` for `transformers grouped_mm`."""
    return name.rpartition(" ")[2].removesuffix("_mm")


def ratios(row: dict[str, Any], peers: Sequence[str]) -> list[str]:
    """A peer's time over fanfold's, a column a peer; a dash where it has none."""
    found = {peer["name"]: peer["ratio"] for peer in row.get("peers", ())}
    return ["-" if found.get(name) is None else f"{found[name]:.2f}x" for name in peers]


def refused_peers(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Why peers have no figure, once a reason."""
    found = [(peer["name"], peer["refused"]) for row in rows for peer in row.get("peers", ()) if peer["refused"]]
    return [f"{name}: no figure, {reason}" for name, reason in dict.fromkeys(found)]
