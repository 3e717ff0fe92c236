"""`fanfold generate`: several prompts with their adapters as one batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fanfold.cli.output import BASE, errors_reported, out, print_json, progress_bar
from fanfold.cli.pairs import adapter_folders, prompt_rows

if TYPE_CHECKING:
    from fanfold.integrations.transformers.text import Batch


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of the model.", show_default=False)],
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="Load a PEFT adapter under a name. Repeatable.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="A row of the batch: adapter (or base) and text. Repeatable; - reads such lines from standard input.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", help="New tokens a row, at most.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="T", help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Repeatable sampling.", show_default=False)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the tokenizer's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Continue prompts, each with its own adapter, as one batch."""
    with errors_reported(as_json):
        folders = adapter_folders(adapter or [])
        rows = prompt_rows(prompt or [], list(folders))

        from fanfold.integrations.transformers.text import Prompt, generate_text, load_for_text

        prompts = [Prompt(text, name) for name, text in rows]
        with progress_bar() as progress:
            model, tokenizer = load_for_text(checkpoint, folders, progress=progress)
            batch = generate_text(
                model,
                tokenizer,
                prompts,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                chat=chat,
                progress=progress,
            )
    if as_json:
        print_json({"checkpoint": str(checkpoint)} | batch.as_dict())
    else:
        print_rows(batch)


def print_rows(batch: Batch) -> None:
    """Each row under a line of its own, its text as it is."""
    for index, row in enumerate(batch.rows):
        name = row.prompt.adapter or BASE
        facts = f"{row.tokens} tokens, {batch.tokens_per_second(index):.1f} tokens/s"
        out.print(Text.assemble((f"[{index}] ", "dim"), (name, "bold cyan"), (f"  {facts}", "dim")), soft_wrap=True)
        out.print(Text.assemble((row.prompt.text, "dim"), row.text), soft_wrap=True)
        out.print()
