"""`fanfold explain`: which implementation runs a layer, and why."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from fanfold.cli.output import errors_reported, grid, human_bytes, out, print_json


def explain(
    shape: Annotated[
        tuple[int, int, int], typer.Option(metavar="E H I", help="Experts, hidden size, expert intermediate size.")
    ],
    weight_format: Annotated[
        str, typer.Option("--format", metavar="NAME", help="As `fanfold inspect` prints it, e.g. gptq4-g128.")
    ],
    arch: Annotated[str, typer.Option(metavar="ARCH", help="cpu, or a compute capability such as 90.")] = "cpu",
    rows: Annotated[int, typer.Option(metavar="R", help="Rows: tokens times top_k.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which implementation runs an expert layer, which do not and why, and the floor of its time."""
    with errors_reported(as_json):
        from fanfold.explanation import explain as explain_layer

        answer = explain_layer(shape, weight_format, arch, rows)
    if as_json:
        print_json(answer)
    else:
        print_answer(answer)


def print_answer(answer: dict[str, Any]) -> None:
    """The choice, the reasons against the others, the sizes."""
    chosen: str | None = answer["chosen"]
    out.print(
        grid(
            [
                ("format", answer["format"]),
                ("device", answer["arch"]),
                ("runs", Text(chosen, style="bold green") if chosen else Text("nothing", style="bold red")),
                *[(f"not {name}", reason) for name, reason in answer["rejected"].items()],
                ("reads", f"{human_bytes(answer['weight_bytes'])} of packed weights at most"),
                ("computes", f"{answer['flops']:,} operations"),
                ("floor", floor(answer)),
            ],
            indent=0,
        )
    )


def floor(answer: dict[str, Any]) -> str:
    """The least time the layer can take, where the device's rates are known."""
    if answer["floor_us"] is None:
        return "not known for this device"
    return f"{answer['floor_us']:.1f} us on {answer['floor_of']}"
