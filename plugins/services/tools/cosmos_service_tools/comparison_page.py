"""The page of a comparison: the table, and the curves of all runs over one another."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from cosmos_core.errors import ConfigError
from cosmos_core.run import folder
from cosmos_core.run.report.curves import Chart, Series, environment
from cosmos_service_tools.comparison import Compared, lines, notes

Points: TypeAlias = list[tuple[float, float]]

_FIRST: Final = {
    "reward/mean": "Reward",
    "heldout/accuracy": "Held-out accuracy",
    "heldout/reward": "Held-out reward",
    "heldout/loss": "Held-out loss",
    "train/loss": "Loss",
    "train/entropy": "Entropy",
    "train/grad_norm": "Gradient norm",
}
_PARTS: Final = {"reward": "Rewards", "heldout": "Held out", "train": "Training"}
_OF_WARMUP: Final = " of the warm-up"
_MOST_POINTS: Final = 2000
"""Of a line."""
_LOGARITHMIC: Final = ("train/grad_norm",)


def check_page(path: Path) -> None:
    """Refuse a file that a page should not replace, or cannot be made; raises ConfigError."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--output: {path} does not end in .html; give the page's file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--output: {path.parent} is no folder; make it, or choose another file")


def write_page(runs: Sequence[Compared], path: Path, *, is_chosen: bool) -> None:
    """Write the page, to a file of `--output` or into a run's folder; raises ConfigError if it cannot be written."""
    charts = _charts(runs)
    first = [charts.pop(title) for title in (*_FIRST.values(), f"Loss{_OF_WARMUP}") if title in charts]
    parts: dict[str, list[Chart]] = {}
    for title, chart in charts.items():
        parts.setdefault("Warm-up" if title.endswith(_OF_WARMUP) else _part(title), []).append(chart)
    parts |= {last: parts.pop(last) for last in ("Other", "Warm-up") if last in parts}
    text = (
        environment(Path(__file__).parent)
        .get_template("comparison.html.j2")
        .render(
            runs=[(run.label, run.outcome, _report(run, path)) for run in runs],
            lines=lines(runs),
            notes=notes(runs),
            first=first,
            parts=parts,
        )
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        if is_chosen:
            raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from error
        where = f"{path.parent}: no {path.name} can be written into the first run's folder: {error.strerror}"
        raise ConfigError(f"{where}; give the page's file with --output FILE.html") from error


def _report(run: Compared, page: Path) -> str:
    """The report of a run, as the page links to it; empty where it has none."""
    report = run.directory / folder.REPORT
    return os.path.relpath(report, page.resolve().parent) if report.exists() else ""


def thin(points: Points) -> Points:
    """At most as many points as a page should hold: neighbours are averaged, so that noise stays honest."""
    if len(points) <= _MOST_POINTS:
        return points
    edges = [round(index * len(points) / _MOST_POINTS) for index in range(_MOST_POINTS + 1)]
    buckets = (points[first:last] for first, last in itertools.pairwise(edges))
    return [(math.fsum(x for x, _ in some) / len(some), math.fsum(y for _, y in some) / len(some)) for some in buckets]


def _part(title: str) -> str:
    return _PARTS.get(title.partition("/")[0], "Other")


def _charts(runs: Sequence[Compared]) -> dict[str, Chart]:
    """The charts by title, with a line for each run; what two algorithms measure is not the same quantity."""
    is_shifted = len({run.warmup for run in runs if run.rows}) > 1
    label = "step after the warm-up" if is_shifted else "step"

    def main(run: Compared, row: Mapping[str, Any]) -> float | None:
        is_later = row["step"] > run.warmup or (row["kind"] == "evaluation" and row["step"] == run.warmup)
        return row["step"] - (run.warmup if is_shifted else 0) if is_later else None

    def before(run: Compared, row: Mapping[str, Any]) -> float | None:
        return row["step"] if row["step"] <= run.warmup else None

    return _stage(runs, main, "", label) | _stage(runs, before, _OF_WARMUP, "step of the warm-up")


def _stage(
    runs: Sequence[Compared], place: Callable[[Compared, Mapping[str, Any]], float | None], whose: str, x_label: str
) -> dict[str, Chart]:
    found: dict[str, list[Points]] = {}
    for index, run in enumerate(runs):
        for row in run.rows:
            x = place(run, row)
            for name, value in row.items():
                if x is not None and "/" in name and isinstance(value, int | float):
                    found.setdefault(name, [[] for _ in runs])[index].append((x, float(value)))
    charts = {}
    for name, points in sorted(found.items()):
        if all(len(line) < 2 for line in points) or all(value == 0 for line in points for _, value in line):
            continue
        title = _FIRST.get(name, name) + whose
        is_marked = name.startswith("heldout/")
        series = [
            Series(label=run.label, points=thin(line), marked=is_marked) for run, line in zip(runs, points, strict=True)
        ]
        chart = Chart(title=title, series=series, x_label=x_label, logarithmic=name in _LOGARITHMIC)
        if chart.data["series"]:
            charts[title] = chart
    return charts
