"""Renders a snapshot of a run for a terminal: tables and sparklines, or a line of text."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cosmos_core.control.live.event_feed import Curve
from cosmos_core.control.live.snapshot import Snapshot
from cosmos_core.observe import live
from cosmos_core.observe.live import bar_and_figures, clock

_BARS: Final = "▁▂▃▄▅▆▇█"
_SPARKS: Final = 48
_MOST_ROWS: Final = 16
_MOST_NEWS: Final = 8
_COLOURS: Final = {
    "generating": "green",
    "training": "green",
    "loading": "cyan",
    "forming": "cyan",
    "draining": "yellow",
    "lost": "red",
}
_CURVES: Final = ("reward", "loss", "held-out accuracy", "held-out reward", "mismatch", "staleness")


def lines(snapshot: Snapshot) -> list[str]:
    """The figures of a run as one line, and one for its replicas."""
    figures = " | ".join(f"{label} {value}" for label, value in facts(snapshot))
    head = f"{snapshot.name}: {clock(snapshot.elapsed_s)} {snapshot.phase} | {_steps(snapshot)} | {figures}"
    told = (f"  {each}" for each in snapshot.findings)
    return [head, *(f"  {role}: {counts}" for role, counts in pools(snapshot)), *told]


def screen(snapshot: Snapshot, height: int = 50) -> RenderableType:
    """Everything about a run that fits.

    Tables that are longer than the terminal's `height` are cut, and say so.
    """
    most_rows = max(2, min(_MOST_ROWS, height - _MOST_NEWS - 14))
    left = Text.assemble((snapshot.name, "bold"), f"  {snapshot.phase}")
    right = f"{_steps(snapshot)}  {clock(snapshot.elapsed_s)}"
    head = bar_and_figures(left, snapshot.step, snapshot.num_steps, right, facts(snapshot))
    parts: list[RenderableType] = [*head, _replicas(snapshot, most_rows)]
    parts += [curves for curves in (_curves(snapshot),) if curves.row_count]
    parts += [Text(str(each), style="yellow") for each in snapshot.findings]
    parts.append(_news(snapshot))
    if snapshot.reason:
        parts.append(Text(snapshot.reason, style="red"))
    return Group(*parts)


def facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """(label, value) of everything that is known: what the terminal of the run shows, and more."""
    queue, members = snapshot.queue, len(snapshot.members)
    found = dict(live.facts(snapshot)) | {
        "weights": str(snapshot.version) if snapshot.version >= 0 else "none yet",
        "generation": f"{snapshot.generation} ({members} member{'s' if members != 1 else ''})",
        "queue": f"{queue.queued} queued, {queue.in_flight} in flight, {queue.finished} finished, "
        f"{queue.batched} batched",
    }
    found |= {} if snapshot.loss is None else {"loss": format(snapshot.loss, ".4g")}
    found |= {} if snapshot.mismatch is None else {"mismatch": format(snapshot.mismatch, ".2e")}
    more = {
        "rewards": ", ".join(f"{name} {value:.3f}" for name, value in snapshot.rewards.items()),
        "staleness": " ".join(f"{age}:{count}" for age, count in snapshot.staleness.items()),
        "wasted": f"{queue.wasted:.1%} of {snapshot.unit}s" if queue.wasted else "",
        "dropped": ", ".join(f"{count:,} {reason}" for reason, count in sorted(queue.dropped.items())),
        **dict(sorted(snapshot.settings.items())),
        "refused": f"{snapshot.refused} (see logs/controller.jsonl)" if snapshot.refused else "",
    }
    return [*(found | {label: value for label, value in more.items() if value}).items()]


def pools(snapshot: Snapshot) -> list[tuple[str, str]]:
    """(role, its replicas by what they do)."""
    return [
        (role, ", ".join(f"{count} {status}" for status, count in counts.items()))
        for role, counts in snapshot.statuses.items()
    ]


def sparkline(curve: Curve, width: int = _SPARKS) -> str:
    """A curve as a line of bars, from its lowest value to its highest."""
    values = [value for _, value in curve.points]
    if len(values) > width:
        edges = [index * len(values) // width for index in range(width + 1)]
        values = [sum(values[first:last]) / (last - first) for first, last in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _steps(snapshot: Snapshot) -> str:
    eta = "" if snapshot.eta_s is None else f", ETA {clock(snapshot.eta_s)}"
    return f"step {snapshot.step}/{snapshot.num_steps}{eta}"


def _replicas(snapshot: Snapshot, most: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("replica", "state", "weights", "in flight", "tok/s", "where"):
        table.add_column(header, justify="right" if header in ("weights", "in flight", "tok/s") else "left")
    for replica in snapshot.replicas[:most]:
        table.add_row(
            Text(replica.name),
            Text(replica.status, style=_COLOURS.get(replica.status, "")),
            str(replica.step) if replica.step >= 0 else "",
            str(replica.in_flight) if replica.role == "rollout" else "",
            f"{replica.gauges['units_per_s']:,.0f}" if "units_per_s" in replica.gauges else "",
            Text(replica.detail or replica.place, overflow="ellipsis", no_wrap=True),
        )
    if len(snapshot.replicas) > most:
        rest = "; ".join(f"{role}: {counts}" for role, counts in pools(snapshot))
        table.add_row("…", Text(rest), "", "", "", "")
    return table


def _curves(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    found = {curve.name: curve for curve in snapshot.curves}
    for name in _CURVES:
        if (curve := found.get(name)) is not None and len(curve.points) > 1:
            values = [value for _, value in curve.points]
            table.add_row(
                Text(name, style="dim"),
                Text(sparkline(curve), style="blue"),
                Text(f"{min(values):.3g} to {max(values):.3g}, now {values[-1]:.3g}"),
            )
    return table


def _news(snapshot: Snapshot) -> Table:
    table = Table.grid(padding=(0, 2))
    for news in list(snapshot.news)[-_MOST_NEWS:]:
        clock = dt.datetime.fromtimestamp(news.time).astimezone().strftime("%H:%M:%S")
        table.add_row(Text(clock, style="dim"), Text(news.kind), Text(news.text, overflow="ellipsis", no_wrap=True))
    return table
