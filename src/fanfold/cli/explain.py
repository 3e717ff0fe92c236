"""`fanfold explain`: which kernels run a layer, why, and how long it takes at least."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import errors_reported, grid, human_bytes, out, print_json
from fanfold.errors import ArgumentError


def explain(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="Folder of a model; or give --shape and --format.", show_default=False)
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="T,H,I,E,k",
            help="Tokens, hidden size, expert intermediate size, experts, experts a token.",
            show_default=False,
        ),
    ] = None,
    weight_format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="NAME", help="As `fanfold inspect` prints it, e.g. gptq4-g128.", show_default=False
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, metavar="T", help="Tokens of a call of CHECKPOINT.", show_default="1")
    ] = None,
    arch: Annotated[str, typer.Option(metavar="ARCH", help="cpu, or a compute capability such as 90.")] = "cpu",
    adapters: Annotated[
        int, typer.Option(min=0, metavar="N", help="Adapters of the batch, on all experts; every token has one.")
    ] = 0,
    rank: Annotated[int, typer.Option(min=1, max=512, metavar="R", help="Of the adapters.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which kernels and configs run an expert layer, which do not and why, bytes, flops and the floor."""
    with errors_reported(as_json):
        from fanfold.explanation import explain as explain_layer
        from fanfold.explanation import explain_checkpoint

        if checkpoint is not None:
            check_alone(shape, weight_format)
            answer = explain_checkpoint(checkpoint, arch, tokens or 1, adapters, rank)
        else:
            sizes, fmt = asked(shape, weight_format, tokens)
            count, hidden, intermediate, experts, top_k = sizes
            answer = explain_layer((experts, hidden, intermediate), fmt, arch, count * top_k, top_k, adapters, rank)
    if as_json:
        print_json(answer)
    elif "answers" in answer:
        out.print(Text.assemble((answer["path"], "bold"), (f"  {answer['model_type']}", "dim")), soft_wrap=True)
        for found in answer["answers"]:
            print_answer(found)
    else:
        print_answer(answer)


def check_alone(shape: str | None, weight_format: str | None) -> None:
    """A checkpoint has sizes and formats of its own.

    Raises:
        ArgumentError: others were given.
    """
    if shape is not None or weight_format is not None:
        raise ArgumentError(
            "CHECKPOINT",
            found="--shape or --format beside it",
            expected="a checkpoint, or --shape and --format",
            next_step="Leave out the options: a checkpoint's layers have sizes and formats of their own.",
        )


def asked(shape: str | None, weight_format: str | None, tokens: int | None) -> tuple[list[int], str]:
    """The numbers of `T,H,I,E,k`, and the format.

    Raises:
        ArgumentError: one is missing or malformed, or there are two numbers of tokens.
    """
    parts = [] if shape is None else shape.split(",")
    sizes = [int(part) for part in parts if part.strip().isdecimal()]
    if len(parts) != 5 or len(sizes) != 5 or min(sizes) < 1 or sizes[4] > sizes[3]:
        raise ArgumentError(
            "--shape",
            found="nothing" if shape is None else repr(shape),
            expected="T,H,I,E,k: five numbers from 1 on, k at most E; or a CHECKPOINT",
            next_step="E.g. --shape 16,2048,768,128,8: 16 tokens, H = 2048, I = 768, 128 experts, 8 a token.",
        )
    if weight_format is None or tokens is not None:
        raise ArgumentError(
            "--format" if weight_format is None else "--tokens",
            found="nothing" if weight_format is None else "--tokens beside --shape",
            expected="--shape T,H,I,E,k and --format NAME",
            next_step="E.g. --shape 16,2048,768,128,8 --format gptq4-g128.",
        )
    return sizes, weight_format


def print_answer(answer: dict[str, Any]) -> None:
    """The choice, the reasons against the others, the launches, the work and the times."""
    chosen: str | None = answer["chosen"]
    sizes = answer["shape"]
    layer = f"{sizes['num_experts']} experts, hidden {sizes['hidden']}, intermediate {sizes['intermediate']}"
    rows: list[tuple[str, str | Text]] = [
        ("layers", ranges(answer["layers"])) if "layers" in answer else ("layer", layer),
        ("format", f"{answer['format']}, {activations(answer)}"),
        ("batch", batch(answer)),
        ("device", answer["arch"]),
        ("runs", Text(chosen, style="bold green") if chosen else Text("nothing", style="bold red")),
        *[(f"not {name}", reason) for name, reason in answer["rejected"].items()],
        *[("never run", Text(what, "yellow")) for what in answer["never_run"]],
    ]
    if "layers" in answer:
        rows.insert(1, ("sizes", layer))
    if answer["table"]:
        rows.append(("table", tuned_row(answer["table"])))
    out.print(grid(rows, indent=0))
    if answer["launches"]:
        out.print(launches(answer["launches"], answer["expected_us"]))
    out.print(parts(answer["parts"]))
    out.print(grid(times(answer), indent=0))
    out.print()


def ranges(layers: list[int]) -> str:
    """E.g. `0-3, 5`."""
    found: list[list[int]] = []
    for layer in layers:
        if found and layer == found[-1][1] + 1:
            found[-1][1] = layer
        else:
            found.append([layer, layer])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)


def activations(answer: dict[str, Any]) -> str:
    """Their dtype, and what they are rounded to."""
    rounded = "" if answer["activation_format"] == "plain" else f" rounded to {answer['activation_format']}"
    return f"{answer['dtype']} activations{rounded}"


def batch(answer: dict[str, Any]) -> str:
    """Tokens, rows, adapters."""
    tokens = "1 token" if answer["tokens"] == 1 else f"{answer['tokens']:,} tokens"
    words = f"{tokens} of {answer['top_k']} experts, {answer['rows']:,} rows"
    return f"{words}, {answer['adapters']} adapters of rank {answer['rank']}" if answer["adapters"] else words


def tuned_row(row: dict[str, Any]) -> str:
    """The row that configs come from, and whether it is of this very layer."""
    sizes = ",".join(str(row[name]) for name in ("tokens", "hidden", "intermediate", "experts", "top_k"))
    whose = "this layer" if row["same_layer"] else "the nearest layer"
    run = f", run {row['run']}" if row["run"] else ""
    measured = f"measured {row['measured']} on {row['gpu']}{run}"
    return f"{row['table']}: {whose}, {row['format']} {sizes}\n{measured}"


def launches(steps: list[dict[str, Any]], us: dict[str, float] | None) -> Table:
    """A line a launch; why a config is not the table's below it."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("launch", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    table.add_column("config", overflow="fold")
    if us is not None:
        table.add_column("us", justify="right", no_wrap=True)
    for step in steps:
        config = Text(step["config"] or "")
        if step["changed"]:
            config.append(f"\nnot {step['from']}: needs {', '.join(step['changed'])}", "dim")
        elif step["from"] not in (None, step["config"]):
            config.append(f"\n{step['from']}", "dim")
        took = [] if us is None else [f"{us[step['step']]:.1f}" if step["step"] in us else ""]
        table.add_row(step["step"], step["kernel"], config, *took)
    return table


def parts(found: dict[str, dict[str, int]]) -> Table:
    """Bytes and operations of each part."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_column("operations", justify="right")
    for name, part in found.items():
        table.add_row(name, human_bytes(part["bytes"]), f"{part['flops']:,}" if part["flops"] else "")
    return table


def times(answer: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """The floor, and what was measured."""
    floor, uniform = answer["floor_us"], answer["uniform"]
    if floor is None:
        return [("floor", "not known for this device")]
    rows: list[tuple[str, str | Text]] = [
        (
            "floor",
            f"{uniform['floor_us']:.1f} us on {answer['floor_of']} if routing is uniform "
            f"({uniform['experts']:.1f} of {answer['shape']['num_experts']} experts met); "
            f"{floor:.1f} us if rows meet as many as they can",
        )
    ]
    if answer["expected_us"] is not None:
        expected = answer["expected_us"]
        roof = f", {expected['floor'] / expected['layer']:.0%} of the roof" if expected["floor"] else ""
        rows.append(("expected", f"{expected['layer']:.1f} us, as measured{roof}"))
    return rows
