"""`fanfold doctor`: what this machine has, what runs on it, and one layer checked."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from fanfold.cli.output import errors_reported, grid, human_bytes, out, print_json, progress_bar

Rows = list[tuple[str, str | Text]]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what runs here and why not the rest, and check one layer; exit 1 where that is wrong."""
    with errors_reported(as_json):
        from fanfold.diagnosis import diagnose

        with progress_bar() as progress:
            report = diagnose(progress=progress)
    if as_json:
        print_json(report)
    else:
        print_report(report)
    if not report["ok"]:
        raise typer.Exit(1)


def print_report(report: dict[str, Any]) -> None:
    """Versions, GPUs, what runs, places, and the checks."""
    for title, rows in (
        ("Versions", versions(report)),
        ("GPU", gpus(report)),
        (f"Runs on {report['arch']}", runs(report["runs"])),
        ("Places", places(report)),
        ("Check", checks(report["checks"])),
    ):
        out.print(Text(title, "bold"))
        out.print(grid(rows))


def versions(report: dict[str, Any]) -> Rows:
    """Of the packages, and the machine."""
    found: dict[str, str | None] = report["versions"]
    rows: Rows = [(name, number or Text("not installed", "yellow")) for name, number in found.items()]
    if report["commit"]:
        rows.append(("commit", report["commit"]))
    return [*rows, ("machine", report["machine"])]


def gpus(report: dict[str, Any]) -> Rows:
    """A row a GPU, and what kernels need beside it."""
    rows: Rows = [
        (
            f"cuda:{index}",
            f"{gpu['name']}, {gpu['arch']}, {human_bytes(gpu['memory_bytes'])}"
            + (f"; no kernels: {gpu['refusal']}" if gpu["refusal"] else ""),
        )
        for index, gpu in enumerate(report["gpus"])
    ]
    if not rows:
        rows.append(("none", report["unused"] or "layers run on the CPU, with the reference"))
    if report["driver"]:
        rows.append(("driver", report["driver"]))
    rows.append(("CUDA", report["cuda"] or f"torch {report['versions']['torch']} is built without it"))
    missing = Text("none found: Triton needs one where there is a GPU", "yellow" if report["gpus"] else "")
    return [*rows, ("C compiler", report["compiler"] or missing)]


def runs(found: list[dict[str, Any]]) -> Rows:
    """What runs which formats, then who is refused and why, formats of one answer together."""
    chosen: dict[str, list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for row in found:
        chosen.setdefault(row["implementation"] or "nothing", []).append(row["format"])
        for reason in row["rejected"].items():
            refused.setdefault(reason, []).append(row["format"])
    rows: Rows = [(name, formats(names, len(found))) for name, names in chosen.items()]
    for (name, why), names in refused.items():
        whose = "" if len(names) == len(found) else f" ({', '.join(names)})"
        rows.append((f"not {name}", f"{why}{whose}"))
    return rows


def formats(names: list[str], total: int) -> str:
    """The names, or that they are all."""
    return f"all formats: {', '.join(names)}" if len(names) == total else ", ".join(names)


def places(report: dict[str, Any]) -> Rows:
    """Where measured configs and compiled kernels lie."""
    rows: Rows = [
        ("tuned", f"{table['path']}\n{table['layers']} rows, {table['gpu']}, {table['measured']}")
        for table in report["tables"]
    ]
    for cache in report["caches"]:
        rows.append((f"{cache['name']} cache", cache["path"] + ("" if cache["exists"] else "  (not there yet)")))
    return rows


def checks(found: list[dict[str, Any]]) -> Rows:
    """A row a device."""
    rows: Rows = []
    for check in found:
        what = f"  {check['format']} experts, {check['implementation'] or 'nothing ran'}"
        if check["error"] is not None:
            what += f", {check['error']:.1e} from fp32, limit {check['limit']:.1e}"
        if check["wrong"] is None:
            rows.append((check["device"], Text.assemble(("ok", "bold green"), what)))
        else:
            rows.append((check["device"], Text.assemble(("WRONG", "bold red"), what, f": {check['wrong']}")))
    return rows
