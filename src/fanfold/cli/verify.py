"""`fanfold verify`: the packed run against a dense fp32 run, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import errors_reported, grid, out, print_json, progress_bar
from fanfold.cli.pairs import adapter_folders


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the model.", show_default=False)],
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Check with this adapter too. Repeatable.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare every expert layer and the logits with a dense fp32 run; exit 1 over the tolerance."""
    with errors_reported(as_json):
        folders = adapter_folders(adapter or [])

        from fanfold.verification import verify as verify_checkpoint

        with progress_bar() as progress:
            report = verify_checkpoint(checkpoint, folders, progress=progress)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    if not report["ok"]:
        raise typer.Exit(1)


def print_report(report: dict[str, Any]) -> None:
    """A line a layer, then the logits, the base rows, and the verdict."""
    tolerance: float = report["tolerance"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right")
    table.add_column("format", overflow="fold")
    table.add_column("relative error", justify="right")
    for layer in report["layers"]:
        table.add_row(str(layer["layer"]), layer["format"], figure(layer["relative_error"], tolerance))
    table.add_section()
    table.add_row("", "logits", figure(report["logits"]["relative_error"], tolerance))
    out.print(table)
    equal = report["base_rows_bit_equal"]
    rows = [("base rows", Text("bit-equal to a run without adapters") if equal else Text("DIFFER", "bold red"))]
    verdict = Text("ok", "bold green") if report["ok"] else Text("FAILED", "bold red")
    out.print(grid([*rows, ("tolerance", f"{tolerance:.0e}"), ("verdict", verdict)], indent=0))


def figure(error: float, tolerance: float) -> Text:
    """An error in red where it is over the tolerance, or not a number."""
    return Text(f"{error:.1e}", "" if error <= tolerance else "bold red")
