"""`fanfold demo`: the main job on the bundled model, and the check that it is right."""

from __future__ import annotations

from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import BASE, errors_reported, grid, human_bytes, out, progress_bar
from fanfold.errors import MissingFileError

if TYPE_CHECKING:
    from fanfold.integrations.transformers.text import Batch

NEW_TOKENS = 24
SAME = "The king went to"
UNLIKE = [
    "a small animal that",
    "And the people said",
    "def read(self, path):",
    "The sea",
    "import os",
    "one who",
]


class Format(StrEnum):
    """The quantised versions of the bundled model."""

    GPTQ = "gptq-int4"
    NVFP4 = "nvfp4"


def demo(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder with the model and its adapters.")] = Path(
        "examples/tiny-moe"
    ),
    weight_format: Annotated[Format, typer.Option("--format", help="Which quantised version.")] = Format.GPTQ,
) -> None:
    """Run one batch on the bundled model, base and three adapters, and check it."""
    with errors_reported():
        checkpoint = folder / weight_format
        adapters = {path.name.removeprefix("adapter-"): path for path in sorted(folder.glob("adapter-*"))}
        if not checkpoint.is_dir():
            raise MissingFileError(
                str(checkpoint),
                found="no such folder",
                expected=f"a model in {folder}, beside its adapter-* folders",
                next_step="Run the demo in a clone of fanfold's repository, or name the folder: fanfold demo DIR.",
            )

        from fanfold.inspection import inspect
        from fanfold.integrations.transformers.text import Prompt, generate_text, load_for_text
        from fanfold.verification import verify

        rows: list[str | None] = [None, *adapters]
        same = [Prompt(SAME, name) for name in rows]
        unlike = [Prompt(text, name) for text, name in zip(UNLIKE, cycle(reversed(rows)), strict=False)]
        with progress_bar() as progress:
            model, tokenizer = load_for_text(checkpoint, adapters, progress=progress)
            batches = [
                generate_text(model, tokenizer, prompts, max_new_tokens=NEW_TOKENS, progress=progress)
                for prompts in (same, unlike)
            ]
            report = verify(checkpoint, adapters, progress=progress)
    out.print()
    print_batch("One prompt on the base and on every adapter, one batch", batches[0])
    print_batch("Unlike prompts in mixed order, one batch", batches[1])
    print_loaded(inspect(checkpoint), model.adapters.info())
    print_check(report)
    if not report["ok"]:
        raise typer.Exit(1)


def print_batch(title: str, batch: Batch) -> None:
    """The rows of a batch as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    table.add_column("row", justify="right", style="dim")
    table.add_column("adapter", style="cyan", no_wrap=True)
    table.add_column("prompt", no_wrap=True)
    table.add_column("continuation", overflow="fold", ratio=1)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    for index, row in enumerate(batch.rows):
        rate = batch.tokens_per_second(index)
        shown = f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
        table.add_row(str(index), row.prompt.adapter or BASE, row.prompt.text, one_line(row.text), shown)
    out.print(table)


def one_line(text: str) -> Text:
    """The text with its line breaks drawn instead of made."""
    shown = Text()
    for index, line in enumerate(text.split("\n")):
        shown.append("" if index == 0 else "\u21b5 ", "dim").append(line.strip() + " " if line.strip() else "")
    return shown


def print_loaded(checkpoint: dict[str, Any], adapters: list[dict[str, Any]]) -> None:
    """What is in memory: the packed experts, and each adapter."""
    layer: dict[str, Any] = checkpoint["layers"][0]
    formats = ", ".join(dict.fromkeys(layer[name]["format"] for name in layer if name != "layer"))
    sizes: dict[str, int] = checkpoint["bytes"]
    packed = f"{human_bytes(sizes['experts'])} packed, {human_bytes(sizes['experts_bf16'])} in BF16"
    rows: list[tuple[str, str | Text]] = [("experts", f"{formats}, {packed}")]
    for adapter in adapters:
        ranks = ", ".join(map(str, adapter["ranks"]))
        rows.append((adapter["name"], f"rank {ranks}, {human_bytes(adapter['bytes'])}"))
    out.print(Text("Loaded", "bold"))
    out.print(grid(rows))
    out.print()


def print_check(report: dict[str, Any]) -> None:
    """How far this packed run is from a dense fp32 one, and whether adapters leave base rows alone."""
    logits: dict[str, float] = report["logits"]
    difference = f"at most {logits['max_abs_difference']:.1e} from a dense fp32 run of the same weights"
    relative = f"relative error {logits['relative_error']:.1e}, tolerance {report['tolerance']:.0e}"
    equal = "bit-equal to" if report["base_rows_bit_equal"] else "NOT bit-equal to"
    verdict = Text("passed", "bold green") if report["ok"] else Text("FAILED", "bold red")
    out.print(Text.assemble(("Check ", "bold"), verdict))
    out.print(grid([("logits", f"{difference}\n{relative}"), ("base rows", f"{equal} a run without adapters")]))
