"""`fanfold inspect`: what a checkpoint or an adapter holds, and whether it can run."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from fanfold.cli.output import errors_reported, grid, human_bytes, out, print_json

DENSE = ("bf16", "fp16", "fp32")
INTEGERS = ("gptq", "awq", "packed")


def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of a checkpoint or of an adapter.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show formats, shapes and sizes of a checkpoint or an adapter, and whether it can run."""
    with errors_reported(as_json):
        from fanfold.inspection import inspect as inspect_folder

        report = inspect_folder(path)
    if as_json:
        print_json(report)
        return
    out.print(Text.assemble((report["path"], "bold"), (f"  {report['kind']}", "dim")), soft_wrap=True)
    rows = checkpoint_rows(report) if report["kind"] == "checkpoint" else adapter_rows(report)
    rows += [("warning", Text(warning, "yellow")) for warning in report.get("warnings", [])]
    no = Text.assemble(("no", "bold red"), f": {report['reason']}")
    out.print(grid([*rows, ("can run", Text("yes", "bold green") if report["can_run"] else no)]))


def checkpoint_rows(report: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """Sizes, the formats of the experts by projection, and what does not stay packed."""
    experts: dict[str, Any] | None = report.get("experts")
    if experts is None:
        return []
    sizes: dict[str, int] = report["bytes"]
    share = sizes["experts"] / sizes["experts_bf16"]
    quantised = f"quantised by {report['quantization']}" if report["quantization"] else "not quantised"
    shape = f"hidden {experts['hidden']}, intermediate {experts['intermediate']}"
    activation = f"{'gated ' if experts['gated'] else ''}{experts['activation']}"
    used = f"experts {human_bytes(sizes['experts'])} ({share:.0%} of BF16)"
    rows: list[tuple[str, str | Text]] = [
        ("model", f"{report['model_type']}, {quantised}"),
        ("experts", f"{experts['layers']} layers of {experts['num_experts']}, {shape}, {activation}"),
        ("bytes", f"{used}, other {human_bytes(sizes['other'])}"),
        *format_rows(report["layers"]),
        ("packed", "\n".join(collapsed(report["packed"]))),
    ]
    unpacked = collapsed([f"{entry['module']}  {entry['format']}" for entry in report["unpacked"]])
    if unpacked:
        rows.append(("unpacked", "\n".join(unpacked)))
    return rows


def format_rows(layers: list[dict[str, Any]]) -> list[tuple[str, str | Text]]:
    """A row for each projection and run of layers of the same format."""
    rows: list[tuple[str, str | Text]] = []
    start = 0
    for stop in range(1, len(layers) + 1):
        entry = without_layer(layers[start])
        if stop < len(layers) and without_layer(layers[stop]) == entry:
            continue
        first, last = layers[start]["layer"], layers[stop - 1]["layer"]
        where = f"layer {first}" if first == last else f"layers {first}-{last}"
        for projection, fmt in entry.items():
            experts, n, k = fmt["shape"]
            name = Text.assemble((fmt["format"], "bold cyan"), f"  W [{n}, {k}] of {experts} experts, {where}")
            rows.append((projection, name.append(f"\n{facts(fmt)}", "dim")))
        start = stop
    return rows


def without_layer(entry: dict[str, Any]) -> dict[str, Any]:
    """The projections of a layer's entry."""
    return {name: value for name, value in entry.items() if name != "layer"}


def facts(fmt: dict[str, Any]) -> str:
    """What the name of a format says, in words."""
    words = [f"{fmt['bits']} bits"]
    if fmt["block"] is not None:
        rows, columns = ("all" if size == -1 else str(size) for size in fmt["block"])
        words.append(f"a scale for {rows} x {columns}")
    elif fmt["kind"] not in DENSE:
        words.append("a scale a row" if fmt["group_size"] == -1 else f"groups of {fmt['group_size']}")
    if fmt["kind"] in INTEGERS:
        words.append("symmetric" if fmt["symmetric"] else "asymmetric")
        if not fmt["symmetric"]:
            words.append("stored zero points are 1 less" if fmt["zero_point"] == "v1" else "zero points as stored")
        words.append("act-order" if fmt["act_order"] else "no act-order")
    if fmt["activations"] != "plain":
        words.append(f"activations {fmt['activations']}")
    return ", ".join(words)


def collapsed(names: list[str]) -> list[str]:
    """Names with layer numbers drawn together: `model.layers.*.mlp.experts  (4)`."""
    counts = Counter(re.sub(r"\blayers\.\d+\.", "layers.*.", name) for name in names)
    return [name if count == 1 else f"{name}  ({count})" for name, count in counts.items()]


def adapter_rows(report: dict[str, Any]) -> list[tuple[str, str | Text]]:
    """Ranks, targets, sizes."""
    if "targets" not in report:
        return []
    layers: list[int] = report["layers"]
    return [
        ("ranks", ", ".join(map(str, report["ranks"]))),
        ("targets", ", ".join(f"{name} ({count})" for name, count in report["targets"].items())),
        ("layers", f"{len(layers)} ({layers[0]}-{layers[-1]})" if layers else "none"),
        ("bytes", human_bytes(report["bytes"])),
        ("written by", f"PEFT {report['peft_version']}" if report["peft_version"] else "PEFT before 0.18"),
    ]
