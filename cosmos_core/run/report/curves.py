"""Curves of a page: what is drawn, as data, and the page that has the script which draws it, with hover and zoom.

The script is uPlot and `assets/curves.js`, inlined, with what else a page asks for. A page's policy lets nothing else
run, and nothing be fetched; the report's lets images and videos be that lie beside it.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import jinja2

_HERE: Final = Path(__file__).parent
_ASSETS: Final = _HERE / "assets"


@attrs.frozen(kw_only=True)
class Series:
    """A line of a chart: its label and (x, y), broken where y is None; `marked` draws each point (few, exact ones)."""

    label: str
    points: Sequence[tuple[float, float | None]]
    marked: bool = False


@attrs.frozen(kw_only=True)
class Chart:
    """Lines over one axis.

    Attributes:
        title: Above it.
        series: The lines. One without points is not drawn, and keeps its colour.
        x_label: The quantity along it; charts that share one are zoomed together.
        y_label: The quantity upwards, with its unit.
        changes: Where faint vertical lines stand, such as changes of settings.
        logarithmic: Whether the vertical axis is; values that are not positive are left out.
    """

    title: str
    series: Sequence[Series]
    x_label: str = "step"
    y_label: str = ""
    changes: Sequence[float] = ()
    logarithmic: bool = False

    @functools.cached_property
    def data(self) -> dict[str, Any]:
        """The chart as `curves.js` takes it; its `series` is empty where there is nothing to draw."""
        drawn = []
        for colour, line in enumerate(self.series):
            known = [
                (round(x, 3), None if y is None else float(f"{y:.6g}"))
                for x, y in line.points
                if y is None or (math.isfinite(y) and (y > 0 or not self.logarithmic))
            ]
            if any(y is not None for _, y in known):
                xs, ys = zip(*known, strict=True)
                drawn.append({"label": line.label, "marked": line.marked, "colour": colour, "xs": xs, "ys": ys})
        return {"x": self.x_label, "logarithmic": self.logarithmic, "changes": list(self.changes), "series": drawn}


def environment(*folders: Path, scripts: Sequence[Path] = (), styles: Sequence[Path] = ()) -> jinja2.Environment:
    """Templates of `folders` and of the report: a page extends `base.html.j2`, and draws by its macro `plots`.

    `scripts` and `styles` are files of the page's own, inlined after those that draw.
    """
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, _HERE]), autoescape=True, undefined=jinja2.StrictUndefined
    )
    asset = {path.name: path.read_text(encoding="utf-8") for path in _ASSETS.iterdir()}
    own_scripts, own_styles = (
        "".join(f"\n{path.read_text(encoding='utf-8')}" for path in paths) for paths in (scripts, styles)
    )
    script = f"/*\n{asset['uplot.LICENSE']}*/\n{asset['uplot.min.js']}\n{asset['curves.js']}{own_scripts}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    made.globals |= {"script": script, "script_hash": digest, "style": asset["uplot.min.css"] + own_styles}
    return made
