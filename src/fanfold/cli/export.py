"""`fanfold export`: kernels for hosts in other languages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from fanfold.cli.output import errors_reported, grid, human_bytes, out, print_json, progress_bar
from fanfold.errors import ArgumentError


def export(
    arch: Annotated[
        list[int], typer.Option("--arch", metavar="NN", help="Compute capability; may be repeated.", show_default=False)
    ],
    op: Annotated[
        list[str], typer.Option("--op", metavar="NAME", help="What kernels do; may be repeated.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where the result goes.", show_default=False)
    ] = None,
    hub: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Instead: where it goes as a repository of the kernels hub.",
                     show_default=False),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", metavar="NAME", help="Of activations: bf16 (without), fp16, fp32; repeatable.",
                     show_default=False),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="NAME", help="Of weights; without, all that an op is exported for.",
                     show_default=False),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option("--config", metavar="NAME", help="Name of a config; without, all that the library selects.",
                     show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Compile kernels to PTX and cubin, with a manifest and a C launcher; no GPU is needed."""
    with errors_reported(as_json):
        from fanfold.export.export import export as write_export

        folder = one_folder(output, hub)
        with progress_bar() as progress:
            wanted = arch, op, dtype or ["bf16"], formats or [], config or []
            report = write_export(folder, *wanted, progress, hub=hub is not None)
    if as_json:
        print_json(report)
    else:
        print_report(report)


def one_folder(output: Path | None, hub: Path | None) -> Path:
    """The one of the two that is given.

    Raises:
        ArgumentError: none is, or both.
    """
    if (output is None) == (hub is None):
        raise ArgumentError(
            "--output and --hub",
            found="neither" if output is None else "both",
            expected="one of the two",
            next_step="Pass -o DIR, or --hub DIR for a repository of the kernels hub.",
        )
    return cast(Path, output or hub)


def print_report(report: dict[str, Any]) -> None:
    """Kernels by op, their size, which of them spill, and versions."""
    made: dict[str, str] = report["made_by"]
    kernels: dict[str, int] = report["kernels"]
    spilled: dict[str, int] = report["spilled"]
    rows: list[tuple[str, str | Text]] = [(op, f"{count} kernels") for op, count in kernels.items()]
    rows.append(("machine code", human_bytes(report["bytes"])))
    for kernel, count in spilled.items():
        rows.append(("spills", f"{kernel}: {count} bytes a thread"))
    rows.append(("made by", ", ".join(f"{name} {version}" for name, version in made.items())))
    rows.append(("written to", report["folder"]))
    out.print(grid(rows, indent=0))
