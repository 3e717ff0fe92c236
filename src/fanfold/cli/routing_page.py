"""The page of `fanfold routing`: one HTML file with heat maps in SVG, light and dark, that loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from fanfold.cli.output import BASE
from fanfold.cli.routing_levels import CHANGES, LEVELS, change_of, level_of, relative_load

WIDTH, ROW, LEFT, TOP = 900, 18, 44, 20  # pixels of a map: of all cells, a layer, the numbers left and above


class Scheme(NamedTuple):
    """Colours: `load` from nothing to most, `change` from less to more."""

    page: str
    ink: str
    muted: str
    line: str
    load: tuple[str, ...]
    change: tuple[str, ...]

    def variables(self) -> str:
        """As custom properties of a style sheet."""
        named = {"page": self.page, "ink": self.ink, "muted": self.muted, "line": self.line}
        named |= {f"l{level}": colour for level, colour in enumerate(self.load)}
        named |= {f"d{level}": colour for level, colour in enumerate(self.change)}
        return "".join(f"--{name}:{colour};" for name, colour in named.items())


LIGHT = Scheme(
    "#ffffff", "#1c2024", "#5f6872", "#d9dee3",
    ("#e9ecef", "#e3eef9", "#c3dcf2", "#98c3e6", "#62a2d5", "#3580bd", "#175b96", "#0a3763"),
    ("#8c3b00", "#c4631b", "#e69a5f", "#f5cfae", "#eef0f2", "#bfe3dc", "#77c0b3", "#2f9384", "#00594d"),
)  # fmt: skip
DARK = Scheme(
    "#15181c", "#e8eaed", "#9aa4ae", "#333a41",
    ("#22272c", "#172a3f", "#1b3f63", "#22588a", "#3278b5", "#5a9fd6", "#93c5ec", "#d3e9fb"),
    ("#ffb77a", "#e08a45", "#a65c22", "#5c3a22", "#2a2f35", "#1f4a45", "#2a7a6e", "#4fb3a3", "#9be8da"),
)  # fmt: skip
WORDS = {
    "max/mean": "rows of the fullest expert over the mean",
    "entropy": "of the shares of rows, in bits",
    "effective": "2 to the entropy: as many experts of equal load have it",
    "unused": "experts without a row",
    "changed": "share of the base's choices that the adapter's run does not make",
    "moved": "share of rows that lie with other experts than in the base's counts",
}


def page(report: dict[str, Any]) -> str:
    """The whole file.

    Args:
        report: of `expert_usage`.
    """
    title = f"Experts that {report['text']} uses"
    base: list[dict[str, Any]] = report["runs"][0]["layers"]
    facts = f"{report['path']}, {report['model_type']}: {report['tokens']:,} tokens, in windows of {report['window']:,}"
    sections = [section(run, base) for run in report["runs"]]
    words = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in WORDS.items())
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title><style>{style()}</style></head><body><main>",
            f"<h1>{escape(title)}</h1><p class='muted'>{escape(facts)}</p>",
            *sections,
            f"<h2>Words</h2><dl>{words}</dl>",
            "</main></body></html>",
            "",
        ]
    )


def style() -> str:
    """Colours by scheme, and what the page looks like otherwise."""
    names = [f"l{level}" for level in range(len(LIGHT.load))] + [f"d{level}" for level in range(len(LIGHT.change))]
    cells = "".join(f".{name}{{fill:var(--{name})}}" for name in names)
    return (
        f":root{{color-scheme:light dark;{LIGHT.variables()}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{DARK.variables()}}}}}"
        "body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
        "main{max-width:60rem;margin:0 auto;padding:1.5rem 1rem 3rem}"
        "h1{font-size:1.4rem;margin:0;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2.2rem 0 .4rem}"
        "h3{font-size:.95rem;margin:1.2rem 0 .3rem}p{margin:.2rem 0}.muted{color:var(--muted);overflow-wrap:anywhere}"
        "svg{display:block;width:100%;height:auto}svg text{fill:var(--muted);font:11px system-ui,sans-serif}"
        ".key{display:flex;flex-wrap:wrap;gap:.15rem .9rem;color:var(--muted);font-size:.8rem;margin:.3rem 0 .8rem}"
        ".key svg{display:inline-block;width:.8rem;height:.8rem;vertical-align:-.1rem;margin-right:.3rem}"
        ".wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
        "th,td{text-align:right;padding:.15rem .7rem;border-bottom:1px solid var(--line)}"
        "th{font-weight:600;color:var(--muted)}dt{font-weight:600}dd{margin:0 0 .3rem;color:var(--muted)}" + cells
    )


def section(run: dict[str, Any], base: Sequence[dict[str, Any]]) -> str:
    """The maps and the table of a run: of an adapter its changes first."""
    name = run["adapter"] or BASE
    parts = [f"<section><h2>{escape(name)}</h2>"]
    if run["adapter"] is not None:
        parts += ["<h3>Change of the load, in means</h3>", change_map(name, run["layers"], base), key("d", CHANGES)]
    parts += ["<h3>Load over the mean</h3>", load_map(name, run["layers"]), key("l", LEVELS)]
    return "\n".join([*parts, table(run), "</section>"])


def load_map(name: str, layers: Sequence[dict[str, Any]]) -> str:
    """A row a layer, a cell an expert."""
    loads = [relative_load(layer["counts"]) for layer in layers]

    def cell(row: int, expert: int) -> tuple[str, str]:
        load = loads[row][expert]
        return f"l{level_of(load)}", f"{layers[row]['counts'][expert]:,} rows, {load:.2f} times the mean"

    return heat_map(f"Load of the experts, {name}", layers, cell)


def change_map(name: str, layers: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> str:
    """The same of how far loads are from the base's."""
    before, after = ([relative_load(layer["counts"]) for layer in run] for run in (base, layers))

    def cell(row: int, expert: int) -> tuple[str, str]:
        was, is_now = before[row][expert], after[row][expert]
        return f"d{change_of(is_now - was)}", f"from {was:.2f} to {is_now:.2f} times the mean"

    return heat_map(f"Change of the load of the experts, {name}", layers, cell)


def heat_map(label: str, layers: Sequence[dict[str, Any]], cell: Callable[[int, int], tuple[str, str]]) -> str:
    """An SVG; `cell` gives the class of a cell and what it says under the pointer."""
    experts = max(len(layer["counts"]) for layer in layers)
    width = min(28.0, WIDTH / experts)
    gap = 1 if width > 4 else 0
    every = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if step * width >= 24)
    parts = [
        f'<svg viewBox="0 0 {LEFT + experts * width:g} {TOP + ROW * len(layers)}" role="img" '
        f'style="max-width:{LEFT + experts * width:g}px" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(label)}</title>"
    ]
    for expert in range(0, experts, every):
        x = LEFT + (expert + 0.5) * width
        parts.append(f'<text x="{x:g}" y="{TOP - 6}" text-anchor="middle">{expert}</text>')
    for row, layer in enumerate(layers):
        y = TOP + ROW * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{layer["layer"]}</text>')
        for expert in range(len(layer["counts"])):
            kind, says = cell(row, expert)
            parts.append(
                f'<rect class="{kind}" x="{LEFT + expert * width:g}" y="{y}" width="{width - gap:g}" '
                f'height="{ROW - 1}"><title>layer {layer["layer"]}, expert {expert}: {says}</title></rect>'
            )
    return "".join([*parts, "</svg>"])


def key(kind: str, limits: Sequence[float]) -> str:
    """What the colours say."""
    steps = [f"{low:g} to {high:g}" for low, high in pairwise(limits)]
    words = [f"below {limits[0]:g}", *steps, f"{limits[-1]:g} and more"]
    words = ["none", *words] if kind == "l" else words
    swatch = '<svg viewBox="0 0 10 10" aria-hidden="true"><rect class="{}" width="10" height="10"/></svg>'
    spans = (f"<span>{swatch.format(f'{kind}{i}')}{escape(word)}</span>" for i, word in enumerate(words))
    return f'<div class="key">{"".join(spans)}</div>'


def table(run: dict[str, Any]) -> str:
    """A line a layer, as on the terminal."""
    adapted = run["adapter"] is not None
    heads = [
        "layer",
        "max/mean",
        "fullest",
        "entropy",
        "effective",
        "unused",
        *(["changed", "moved"] if adapted else []),
    ]
    lines = ["".join(f'<th scope="col">{head}</th>' for head in heads)]
    for layer in run["layers"]:
        cells = [
            str(layer["layer"]),
            f"{layer['max_over_mean']:.2f}",
            str(layer["fullest"]),
            f"{layer['entropy']:.2f}",
            f"{layer['effective']:.1f}",
            str(layer["unused"]),
            *([f"{layer['changed']:.1%}", f"{layer['moved']:.1%}"] if adapted else []),
        ]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table>{rows}</table></div>'
