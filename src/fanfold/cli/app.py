"""The commands under one name. Exit codes: 0 fine, 1 a check failed, 2 wrong use or bad input."""

from __future__ import annotations

import os
import warnings
from typing import Annotated

import typer

import fanfold
from fanfold.cli.bench import bench
from fanfold.cli.demo import demo
from fanfold.cli.doctor import doctor
from fanfold.cli.explain import explain
from fanfold.cli.export import export
from fanfold.cli.generate import generate
from fanfold.cli.inspect import inspect
from fanfold.cli.output import show_warning
from fanfold.cli.quantize import quantize
from fanfold.cli.routing import routing
from fanfold.cli.tune import tune
from fanfold.cli.verify import verify

app = typer.Typer(
    name="fanfold",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (demo, generate, inspect, verify, quantize, explain, bench, tune, routing, doctor, export):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fanfold {fanfold.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Mixture-of-Experts checkpoints as the quantiser wrote them, many LoRA adapters in one batch."""


def main() -> None:
    """Runs the command line of this process."""
    # Checkpoints are folders here: the model libraries below have nothing to fetch, and the bars are ours.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.showwarning = show_warning
    app()
