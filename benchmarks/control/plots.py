"""Plots as SVG files for the results, with the page's own text colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_INK: Final = "#010203"  # stands for the page's text colour until it is replaced by `currentColor`
_INKED: Final = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
_STYLE: Final = {
    **dict.fromkeys(_INKED, _INK),
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.prop_cycle": mpl.cycler(color=["#4c8dff", "#f28e2b", "#3fa95c", "#d64f6c"]),
    "grid.alpha": 0.13,
    "legend.frameon": False,
}


def plot(path: Path, lines: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str) -> None:
    """Draw lines, (x, y) by label, into a file; the axis labels have units."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": path.name}):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained", facecolor="none")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot(facecolor="none")
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), label=label, marker="o", markersize=4.5, linewidth=1.8)
        axes.set(xlabel=x_label, ylabel=y_label)
        if len(lines) > 1:
            axes.legend(loc="best")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    text = path.read_text(encoding="utf-8")
    path.write_text(text[text.index("<svg") :].replace(_INK, "currentColor"), encoding="utf-8")
