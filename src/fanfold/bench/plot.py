"""Roofline pictures of measured rows: how near the device's limit each cell comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fanfold.errors import ArgumentError, UnavailableError
from fanfold.spec.arch import ARCHS, Arch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
THEMES = {"light": ("#ffffff", "#1f2328", "#d0d7de"), "dark": ("#0d1117", "#e6edf3", "#30363d")}
"""Background, text, and grid."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#999999")  # Okabe and Ito's
MARKERS = "os^DvPX*"


def plot(rows: Sequence[Row], folder: Path, name: str = "roofline") -> list[Path]:
    """Writes `name`-light and `name`-dark as SVG and PNG.

    A column a layer: above, operations a second over operations a byte, below the roof of the device; beneath, the part
    of the roof that is reached, over the number of tokens. The roof is min(read rate * intensity, matrix rate) of
    `spec.arch`.

    Args:
        rows: of `fanfold bench`; those without a figure, and those without a floor, are left out.
        folder: made where it is missing.
        name: of the files.

    Returns:
        The four files.

    Raises:
        ArgumentError: no row has a figure and a floor.
        UnavailableError: matplotlib is not installed.
    """
    shown = [row for row in rows if row["median_us"] is not None and row["floor_us"] is not None]
    roof = next((arch for arch in ARCHS.values() if shown and arch.name in shown[0]["gpu"]), None)
    if roof is None:
        raise ArgumentError(
            "rows of a roofline plot",
            found=f"{len(rows)} rows, none with a figure and a floor" if not shown else f"rows of {shown[0]['gpu']}",
            expected=f"verified figures of a GPU whose rates are known ({', '.join(a.name for a in ARCHS.values())})",
            next_step="Time layers there: fanfold bench --plot DIR.",
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            "matplotlib",
            found="no module of that name",
            expected="what draws pictures",
            next_step="pip install 'fanfold[plot]'",
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for theme in THEMES:
        figure = _drawn(Figure, shown, roof, theme)
        for kind in ("svg", "png"):
            written.append(folder / f"{name}-{theme}.{kind}")
            # Without a date and with one salt for ids, the same rows give the same bytes.
            options: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 160}
            figure.savefig(written[-1], facecolor=figure.get_facecolor(), **options)
    return written


def caption(rows: Sequence[Row]) -> str:
    """The conditions that the rows share."""
    first = rows[0]
    adapters = f", {first['adapters']} adapters of rank {first['rank']}" if first["adapters"] else ""
    versions = f"torch {first['torch']}, Triton {first['triton']}, commit {str(first['commit'])[:7]}, {first['date']}"
    return (
        f"{first['gpu']}; {first['dtype']} activations, {first['routing']} routing{adapters}; "
        f"medians of {first['timing']}; {versions}"
    )


def _drawn(make: type[Figure], rows: Sequence[Row], roof: Arch, theme: str) -> Figure:
    import matplotlib as mpl

    mpl.rcParams["svg.hashsalt"] = "fanfold"
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    background, text, grid = THEMES[theme]
    shapes = [(shape, list(of_shape)) for shape, of_shape in groupby(rows, key=lambda row: str(row["shape"]))]
    formats = list(dict.fromkeys(str(row["format"]) for row in rows))
    figure = make(figsize=(4.6 * len(shapes) + 0.4, 6.4), facecolor=background, layout="constrained")
    axes = figure.subplots(2, len(shapes), squeeze=False, sharey="row", height_ratios=(3, 2))
    for column, (shape, cells) in enumerate(shapes):
        upper, lower = axes[0, column], axes[1, column]
        _roof(upper, cells, roof, text)
        for number, name in enumerate(formats):
            of_format = [row for row in cells if row["format"] == name]
            style = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
                "ms": 4,
                "lw": 1.2,
            }
            rates = [row["teraflops"] for row in of_format]
            upper.plot([_intensity(row) for row in of_format], rates, label=name, **style)
            parts = [100 / row["over_floor"] for row in of_format]
            lower.plot([row["tokens"] for row in of_format], parts, **style)
        upper.set(xscale="log", yscale="log", xlabel="operations a byte")
        upper.set_title(shape, fontsize=11)
        lower.set(xscale="log", ylim=(0, 100), xlabel="tokens")
        tokens = sorted({row["tokens"] for row in cells})
        lower.set_xticks(tokens, [str(count) for count in tokens])
        lower.minorticks_off()
        for axis in (upper, lower):
            axis.set_facecolor(background)
            axis.grid(color=grid, lw=0.6)
            axis.tick_params(colors=text, which="both", labelsize=8)
            axis.title.set_color(text)
            for label in (axis.xaxis.label, axis.yaxis.label):
                label.set(color=text, size=9)
            for spine in axis.spines.values():
                spine.set_color(grid)
    axes[0, 0].set_ylabel("TFLOP/s")
    axes[1, 0].set_ylabel("% of the roof")
    axes[0, 0].legend(fontsize=8, facecolor=background, edgecolor=grid, labelcolor=text, loc="lower right")
    figure.supxlabel(caption(rows), fontsize=7, color=text)
    return figure


def _roof(axis: Axes, rows: Sequence[Row], roof: Arch, colour: str) -> None:
    """The roof over the intensities of the rows."""
    low, high = min(map(_intensity, rows)) / 2, max(map(_intensity, rows)) * 2
    ridge = roof.matrix_flops / roof.read_bytes
    points = [low, ridge, high] if low < ridge < high else [low, high]
    heights = [min(roof.read_bytes * x, roof.matrix_flops) / 1e12 for x in points]
    axis.plot(points, heights, color=colour, lw=1.5)
    axis.set_xlim(low, high)


def _intensity(row: Row) -> float:
    """Operations a byte that has to be read."""
    return float(row["flops"] / (row["weight_bytes"] + row["adapter_bytes"]))
