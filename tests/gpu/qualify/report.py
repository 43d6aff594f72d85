"""Figures of a qualification, each with its bound and its verdict, as JSON and as a Markdown table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import attrs

Verdict: TypeAlias = Literal["passed", "failed", "measured", "skipped"]


@attrs.frozen(kw_only=True)
class Figure:
    """One thing that was measured, or why it was not.

    Attributes:
        name: Says what, within its stage.
        value: A number, or words where there is none.
        unit: Of the value.
        bound: In words; empty where any value will do.
        verdict: Whether the value keeps to it; `measured` where nothing judges.
        note: More that a reader must know, such as the reason of what is skipped.
    """

    name: str
    value: float | str = ""
    unit: str = ""
    bound: str = ""
    verdict: Verdict = "measured"
    note: str = ""

    @property
    def line(self) -> str:
        """It on one line."""
        told = f"{shown(self.value)} {self.unit}".strip()
        bound = f" (bound: {self.bound})" if self.bound else ""
        return f"{self.verdict:8}  {self.name}: {told or '-'}{bound}{f'; {self.note}' if self.note else ''}"


def judged(
    name: str,
    value: float,
    unit: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    is_judged: bool = True,
    note: str = "",
) -> Figure:
    """A figure with bounds.

    Args:
        name: Of the figure.
        value: Of it; what is no number fails.
        unit: Of value and bounds.
        least: Lower bound.
        most: Upper bound.
        is_judged: False for a speed on a machine that no speed is asked of: its bounds are shown.
        note: As of the figure.
    """
    limits = (("≥", least), ("≤", most))
    bounds = [f"{sign} {shown(each)} {unit}".strip() for sign, each in limits if each is not None]
    is_kept = (least is None or value >= least) and (most is None or value <= most)
    verdict: Verdict = "measured" if not bounds or not is_judged else "passed" if is_kept else "failed"
    return Figure(name=name, value=value, unit=unit, bound=", ".join(bounds), verdict=verdict, note=note)


def shown(value: float | str) -> str:
    """A value for people."""
    if isinstance(value, str):
        return value
    is_long = math.isfinite(value) and (abs(value) >= 1000 or value == int(value))
    return f"{value:,.0f}" if is_long else f"{value:.3g}"


@attrs.define(kw_only=True)
class Report:
    """All that is known so far; written anew with each figure, so that a run that is killed leaves what it had.

    Attributes:
        folder: Where its files go.
        name: Of its files.
        machine: Facts of the machine and its libraries.
        titles: Of the stages, by letter.
    """

    folder: Path
    name: str
    machine: Mapping[str, Any]
    titles: Mapping[str, str]
    figures: Final[dict[str, list[Figure]]] = attrs.field(init=False, factory=dict)
    seconds: Final[dict[str, float]] = attrs.field(init=False, factory=dict)

    @property
    def has_failed(self) -> bool:
        """True if a bound was not kept, or something could not be done."""
        return any(figure.verdict == "failed" for figures in self.figures.values() for figure in figures)

    @property
    def has_run(self) -> bool:
        """True if there is a figure of anything that was not skipped."""
        return any(figure.verdict != "skipped" for figures in self.figures.values() for figure in figures)

    def add(self, stage: str, figure: Figure) -> None:
        """Take up a figure, print it, and write the files."""
        self.figures.setdefault(stage, []).append(figure)
        print(f"  {figure.line}", flush=True)
        self.write()

    def write(self) -> None:
        """Write both files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {
            "machine": dict(self.machine),
            "stages": {
                stage: {
                    "title": self.titles[stage],
                    "seconds": round(self.seconds.get(stage, 0.0), 1),
                    "figures": [attrs.asdict(figure) for figure in figures],
                }
                for stage, figures in self.figures.items()
            },
        }
        new = self.folder / f".{self.name}.new"
        new.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        new.replace(self.folder / f"{self.name}.json")
        (self.folder / f"{self.name}.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The page."""
        lines = [f"# {self.machine['device']}", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items() if name != "device" and value]
        for stage, figures in self.figures.items():
            lines += ["", f"## {stage}: {self.titles[stage]} ({self.seconds.get(stage, 0.0):.0f} s)", ""]
            lines += ["| figure | value | bound | verdict |", "|---|---|---|---|"]
            for each in figures:
                value = f"{shown(each.value)} {each.unit}".strip()
                verdict = f"{each.verdict}: {each.note}" if each.note else each.verdict
                cells = (each.name, value, each.bound, verdict)
                lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
        return "\n".join(lines) + "\n"
