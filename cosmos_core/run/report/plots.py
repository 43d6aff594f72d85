"""Plots as SVG text to be inlined: text takes the page's colour, so they suit light and dark pages alike."""

from __future__ import annotations

import base64
import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from cosmos_core.control.machine.records import EvaluationRecord

MOST_POINTS: Final = 600
_INK: Final = "#010203"  # stands for the page's text colour until it is replaced by `currentColor`
_COLOURS: Final = ("#4c8dff", "#f28e2b", "#3fa95c", "#d64f6c")
_STYLE: Final = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": _INK,
    "grid.alpha": 0.13,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


@attrs.frozen(kw_only=True)
class Series:
    """A line of a plot: its label and its points; `marked` draws each point (few, exact ones)."""

    label: str
    points: Sequence[tuple[float, float]]
    marked: bool = False


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: neighbours are averaged, so that noise stays honest but the page stays small."""
    if len(points) <= most:
        return list(points)
    edges = [round(index * len(points) / most) for index in range(most + 1)]
    buckets = (points[first:last] for first, last in itertools.pairwise(edges))
    return [
        (sum(x for x, _ in bucket) / len(bucket), sum(y for _, y in bucket) / len(bucket))
        for bucket in buckets
        if bucket
    ]


def plot(
    name: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    changes: Sequence[float] = (),
    logarithmic: bool = False,
) -> str:
    """Draw lines into one SVG element, whose ids derive from `name`, unique within the page; empty without any points.

    The axis labels have units. Faint vertical lines show `changes` of settings. All values must be positive if the
    vertical axis is `logarithmic`.
    """
    drawn = [line for line in series if line.points]
    if not drawn:
        return ""
    # The salt makes ids unique, because several SVGs share one page.
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        for line, colour in zip(drawn, _COLOURS, strict=False):
            xs, ys = zip(*thin(line.points), strict=True)
            marker = {"marker": "o", "markersize": 4.5, "linewidth": 1.8} if line.marked else {"linewidth": 1.2}
            axes.plot(xs, ys, label=line.label, color=colour, **marker)
        for change in changes:
            axes.axvline(change, color=_COLOURS[1], linewidth=0.8, linestyle="--", alpha=0.5)
        if logarithmic:
            axes.set_yscale("log")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if len(drawn) > 1:
            axes.legend(loc="best")
        return _svg(figure)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


_PLACE: Final = re.compile(r"(media/step-[0-9]{1,12}/row-[0-9]{1,12})\.(png|mp4|webp)")
_MOST_BYTES: Final = 8 << 20
"""Of all strips of a page: larger ones are left out, and a link to the file stays."""
_MOST_COLUMNS: Final = 6


@attrs.frozen(kw_only=True)
class Picture:
    """An image or video in the run's folder, and some of its frames as a `data:` URL; none where it is not shown."""

    file: str
    strip: str


class Album:
    """The pictures of a run, as long as there is room for them in the page."""

    def __init__(self, directory: Path) -> None:
        self._directory: Final = directory
        self._left = _MOST_BYTES

    def picture(self, media: str) -> Picture | None:
        """The picture of a held-out completion's media; None for anything but media of this run."""
        place = _PLACE.fullmatch(media)
        if place is None:
            return None
        path = self._directory / f"{place[1]}.strip.webp"
        try:
            data = path.read_bytes() if path.stat().st_size <= self._left else b""
        except OSError:
            data = b""
        self._left -= len(data)
        strip = f"data:image/webp;base64,{base64.b64encode(data).decode()}" if data else ""
        return Picture(file=media, strip=strip)


@attrs.frozen(kw_only=True)
class ContactSheet:
    """Held-out rows over the run: the version of each column, and each row's number with its picture in each."""

    versions: Sequence[int]
    rows: Sequence[tuple[int, Sequence[Picture | None]]]


def contact_sheet(evaluations: Sequence[EvaluationRecord], album: Album) -> ContactSheet | None:
    """Some evaluations, the first and the last among them; None where nothing was rendered."""
    seen = [record for record in evaluations if any(each.media for each in record.completions)]
    if not seen:
        return None
    number = min(len(seen), _MOST_COLUMNS)
    chosen = [seen[round(column * (len(seen) - 1) / max(1, number - 1))] for column in range(number)]
    named = [{each.row: each.media for each in record.completions} for record in chosen]
    rows = sorted({row for column in named for row in column})
    return ContactSheet(
        versions=[record.version for record in chosen],
        rows=[(row, [album.picture(column.get(row, "")) for column in named]) for row in rows],
    )
