"""`fanfold bench --model`: a whole model, with fanfold's experts and with transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

from fanfold.cli.output import human_bytes, out, progress_bar


def bench_model(
    path: Path,
    batches: Sequence[int],
    prompt: int,
    new: int,
    adapters: dict[str, Path],
    device: Literal["cuda", "cpu"] | None,
) -> list[dict[str, Any]]:
    """The rows of `throughput`, behind a progress bar."""
    from fanfold.throughput import throughput

    options: dict[str, Any] = {"batches": batches, "prompt": prompt, "new": new, "adapters": adapters, "device": device}
    with progress_bar() as progress:
        return list(throughput(path, **options, progress=progress))


def print_paces(rows: Sequence[dict[str, Any]]) -> None:
    """Where it ran, a line a model and batch, and why some have no figure."""
    first = rows[0]
    adapters = f", adapters in turn: {first['adapters']}" if first["adapters"] else ""
    how = f"{first['dtype']}, prompts of {first['prompt']} tokens, {first['new']} eager decode steps{adapters}"
    out.print(Text.assemble((first["gpu"] or first["machine"], "bold"), (f"  {how}", "dim")), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.title, table.title_justify, table.title_style = first["model"], "left", "bold cyan"
    table.add_column("experts")
    for name in ("rows", "prefill ms", "step ms", "tokens/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if not row["refused"]:
            memory = "" if row["peak_bytes"] is None else human_bytes(row["peak_bytes"])
            figures = (f"{row[name]:,.4g}" for name in ("prefill_ms", "decode_ms", "tokens_per_second"))
            table.add_row(row["experts"], str(row["batch"]), *figures, memory)
    out.print(table)
    for name, reason in dict.fromkeys((row["experts"], row["refused"]) for row in rows if row["refused"]):
        out.print(Text(f"{name}: no figure, {reason}", "dim"))
