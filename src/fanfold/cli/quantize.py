"""`fanfold quantize`: BF16 experts to a quantised checkpoint, and what the rounding cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import errors_reported, grid, human_bytes, out, print_json, progress_bar


def quantize(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a BF16 or FP16 model.", show_default=False)],
    target: Annotated[
        str, typer.Option("--format", metavar="NAME", help="nvfp4, mxfp4, int4 or fp8.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the result goes.", show_default=False)
    ],
    group_size: Annotated[
        int | None,
        typer.Option(metavar="K", help="Of int4: inputs that share a scale (128).", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Round a model's experts to nearest, in compressed-tensors' layout; copy everything else."""
    with errors_reported(as_json):
        from fanfold.quantization.quantize import quantize as quantize_checkpoint

        with progress_bar() as progress:
            report = quantize_checkpoint(checkpoint, output, target, group_size=group_size, progress=progress)
    if as_json:
        print_json(report)
    else:
        print_report(report)


def print_report(report: dict[str, Any]) -> None:
    """A line a layer: the relative error of each projection, and its worst expert; then sizes."""
    projections = [name for name in report["layers"][0] if name != "layer"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", justify="right")
    for name in projections:
        table.add_column(name, justify="right")
        table.add_column("worst", justify="right")
    for layer in report["layers"]:
        cells = [str(layer["layer"])]
        for name in projections:
            errors = layer[name]
            cells += [
                f"{errors['relative_error']:.2%}",
                f"{errors['worst_expert']}: {errors['worst_relative_error']:.2%}",
            ]
        table.add_row(*cells)
    out.print(table)
    sizes: dict[str, int] = report["bytes"]
    share = f"{human_bytes(sizes['experts'])} ({sizes['experts'] / sizes['experts_before']:.0%} of before)"
    rows: list[tuple[str, str | Text]] = [
        ("errors", "relative to the weights' norm; worst: which expert, and its own"),
        ("format", report["format"]),
        ("experts", share),
        ("other", human_bytes(sizes["other"])),
        ("written to", report["output"]),
    ]
    out.print(grid(rows, indent=0))
