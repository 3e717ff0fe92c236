"""`fanfold bench`: how fast an expert layer is, once it is known to be right."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fanfold.cli.bench_model import batch_sizes, bench_model, print_paces
from fanfold.cli.bench_rows import append, read
from fanfold.cli.bench_table import print_rows
from fanfold.cli.output import errors_reported, out, print_json, progress_bar
from fanfold.cli.pairs import adapter_folders
from fanfold.errors import ArgumentError


class ModeName(StrEnum):
    """How calls are made."""

    GRAPH = "graph"
    EAGER = "eager"
    COMPILED = "compiled"


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
        str,
        typer.Option(
            metavar="uniform|balanced|power|hot|recorded:FILE",
            help="Experts equally likely, equally loaded, the n-th with a weight of 1/n, one in all tokens, or those "
            "of a text (`fanfold routing --record`).",
        ),
    ] = "uniform",
    adapters: Annotated[
        int, typer.Option(min=0, metavar="N", help="Adapters on all experts; tokens have one each.")
    ] = 0,
    rank: Annotated[int, typer.Option(min=1, max=512, metavar="R", help="Of the adapters.")] = 16,
    popularity: Annotated[
        PopularityName,
        typer.Option(help="All tokens have one adapter, any, the n-th with a weight of 1/n, each another, or none."),
    ] = PopularityName.UNIFORM,
    implementation: Annotated[str, typer.Option(metavar="NAME", help="auto, or one by name.")] = "auto",
    mode: Annotated[
        ModeName, typer.Option(help="Calls in a CUDA graph (on a GPU), eager ones, or those of torch.compile.")
    ] = ModeName.GRAPH,
    peers: Annotated[
        str | None,
        typer.Option(
            metavar="torch,transformers,vllm,deepgemm",
            help="Others' layers on the same weights, dense, in the same run.",
            show_default=False,
        ),
    ] = None,
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
            routing=routing_named(routing),
            implementation=implementation,
            adapters=adapters,
            rank=rank,
            popularity=popularity.value,
            mode=mode.value,
        )
        beside = []
        if peers is not None:
            from fanfold.integrations.peers import peers_named

            beside = peers_named(peers)
        rows: list[dict[str, Any]] = [] if drawn is None else read(drawn, shape, weight_format)
        if drawn is None:
            with progress_bar() as progress:
                for cell in bench_cells(shapes, formats, counts, settings, progress, beside):
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


def routing_named(text: str) -> Any:
    """The routing of that name, or what a file of `recorded:FILE` holds.

    Raises:
        ArgumentError: neither.
        MissingFileError, CorruptFileError: no such file, or it holds something else.
    """
    from fanfold.bench.batches import ROUTINGS
    from fanfold.bench.recorded import PREFIX
    from fanfold.bench.recorded import read as read_recorded

    if text in ROUTINGS:
        return text
    if text.startswith(PREFIX):
        return read_recorded(Path(text.removeprefix(PREFIX)))
    raise ArgumentError(
        "--routing",
        found=repr(text),
        expected=f"one of {', '.join(ROUTINGS)}, or {PREFIX}FILE",
        next_step=f"E.g. --routing power, or --routing {PREFIX}routing.safetensors.",
    )
