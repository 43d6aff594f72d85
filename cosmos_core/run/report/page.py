"""`report.html`: one self-contained page about a run, made when it finishes, stops or fails."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from markupsafe import Markup

from cosmos_core.config.job import Job, Stage, Unit, stages
from cosmos_core.config.loading import dump_recipe
from cosmos_core.control.live.figures import TimedStep
from cosmos_core.control.machine.records import EvaluationRecord
from cosmos_core.errors import DataError
from cosmos_core.observe.samples import ASSETS, SCRIPT, STYLE, SampleBrowser, encoded
from cosmos_core.protocols import Dataset
from cosmos_core.run.folder import REPORT
from cosmos_core.run.follower import Follower
from cosmos_core.run.report.curves import Chart, Series, environment
from cosmos_core.run.report.summary import (
    durations,
    heldout_names,
    heldout_words,
    of_main_stage,
    own_measures,
    rates_key,
    stale_words,
    unused,
    where_title,
)
from cosmos_core.types import JSON

_TEMPLATE: Final = "report.html.j2"
_COMPARED: Final = 12
_RATE_POINTS: Final = 60  # throughput is averaged over this part of the run

_PLACE: Final = re.compile(r"(media/step-[0-9]{1,12}/row-[0-9]{1,12})\.(png|mp4|webp)")
_MOST_BYTES: Final = 8 << 20
"""Of all strips of a page: larger ones are left out, and a link to the file stays."""
_MOST_COLUMNS: Final = 6
_MOST_OF_SAMPLES: Final = 2 << 20
"""Bytes of the samples of a page; `cosmos samples` shows the others."""


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
class Comparison:
    """A held-out prompt with its first and its last completion (None: not evaluated), and how these look."""

    prompt: str
    reference: JSON
    before: Any
    after: Any
    pictures: tuple[Picture | None, ...] = (None, None)

    @property
    def change(self) -> str:
        """`good` where the reward has risen, `bad` where it has fallen; else empty."""
        before, after = (each and each.reward for each in (self.before, self.after))
        return "" if None in (before, after) or before == after else "good" if after > before else "bad"


def write_report(job: Job, follower: Follower, summary: Mapping[str, Any], dataset: Dataset) -> Path:
    """Write the report of a run; raises OSError if it could not be written."""
    scored = [done for done in follower.evaluations if done.is_of_rollouts]
    compared = [record for record in scored if not record.outdated] or scored
    album = Album(job.directory)
    page = environment(scripts=[ASSETS / SCRIPT], styles=[ASSETS / STYLE]).get_template(_TEMPLATE)
    text = page.render(
        name=summary["name"],
        subtitle=f"{summary['outcome']} · {summary['mode']} mode · seed {summary['seed']} · {summary['run_id']}",
        outcome=summary["outcome"],
        failure=summary["reason"],
        tiles=list(_tiles(summary)),
        findings=summary["findings"],
        problems=summary["problems"],
        charts=[chart for chart in _charts(job, follower, summary["score"]) if chart.data["series"]],
        planes=list(_planes(summary["planes"])),
        where=where_title(summary),
        settings=summary["settings"],
        unused=(("samples dropped", summary["samples"]["dropped"]), *unused(summary)),
        comparisons=_comparisons(compared, dataset, album),
        sheet=contact_sheet(scored, album),
        compared=compared,
        recipe=dump_recipe(job.recipe, job.directory),
        is_text=job.unit == "token",
        **_samples(job),
    )
    path = job.directory / REPORT
    path.write_text(text, encoding="utf-8")
    return path


def _samples(job: Job) -> dict[str, Any]:
    """Data of the browser of samples, None where there are none, and a sentence about them."""
    try:
        found = SampleBrowser(job.directory).embedded(_MOST_OF_SAMPLES)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with its samples, a run has its report
        return {"samples": None, "samples_note": f"the samples cannot be shown: {str(error) or type(error).__name__}"}
    # Nothing in it can end the element that it is in.
    data = Markup(encoded(found).decode()) if found["groups"] else None  # noqa: S704
    return {"samples": data, "samples_note": found["note"]}


def _tiles(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(value, label) of what is told first."""
    unit: Unit = summary["unit"]
    for name in heldout_names(summary["score"], unit):
        for when in ("before", "after")[name == "perplexity" :]:
            value, label = heldout_words(summary, name, when)
            if summary[f"heldout_{name}_{when}"] is not None or f"{name}_{when}" in summary["heldout_notes"]:
                yield value, f"held-out {name} {label}"
    yield f"{summary['steps']} / {summary['planned_steps'] or '?'}", "steps"
    running, *whole = durations(summary)
    yield running, "; ".join(["time that it went on", *whole])
    if summary["samples"]["generated"]:
        yield f"{summary['samples']['generated']:,}", "samples generated"
        yield f"{summary['samples']['trained']:,}", "samples trained on"
    for pool, rate in summary[rates_key(unit)].items():
        if rate is not None:
            yield f"{rate:,.0f}", f"{pool} {unit}s/s"
    if wasted := summary["samples"]["wasted_units"]:
        yield f"{wasted / summary['samples']['units']:.1%}", f"of {unit}s wasted on dropped samples"
    yield from stale_words(summary["samples"], unit)
    if summary["restarts"]:
        yield f"{sum(summary['restarts'].values())}", "processes started again"
    if summary["staleness"]["mean"] is not None:
        yield f"{summary['staleness']['mean']:.2f} / {summary['staleness']['max']}", "staleness mean / max"


def _charts(job: Job, follower: Follower, score: str) -> Iterator[Chart]:
    steps = follower.steps
    # A change shows at the step before the first one that it holds at.
    changed = {change.step for change in follower.state.changes} if follower.state else set()
    changed.update(*(done.outdated.values() for done in follower.evaluations))
    changes = tuple(step - 0.5 for step in changed)
    rewarded = [timed for timed in steps if timed.record.reward is not None]
    heldout = Series(label=f"held-out {score}", points=_heldout(follower, score), marked=True)
    learning = [Series(label="reward", points=_points(rewarded, "reward")), heldout]
    yield Chart(title="Learning", series=learning, changes=changes)
    if len(job.recipe.reward_names) > 1:
        parts = [Series(label=name, points=_points(rewarded, "rewards", name)) for name in job.recipe.reward_names]
        yield Chart(title="Rewards", series=parts, y_label="mean, unweighted", changes=changes)
    staleness = [Series(label=name, points=_points(rewarded, f"staleness_{name}")) for name in ("mean", "max")]
    yield Chart(title="Staleness", series=staleness, y_label="steps", changes=changes)
    yield Chart(title="Throughput", series=_throughput(follower), x_label="seconds", y_label=f"{job.unit}s/s")
    for stage in stages(job.recipe):
        yield from _stage_charts(stage, follower, changes)
    for name, points in own_measures(of_main_stage(follower)).items():
        title = name.replace("_", " ").capitalize()
        yield Chart(title=title, series=[Series(label=name, points=points)], changes=changes)


def _stage_charts(stage: Stage, follower: Follower, changes: Sequence[float]) -> Iterator[Chart]:
    """Loss and gradient norm of a stage: those of two algorithms are not the same quantity."""
    steps = [timed for timed in follower.steps if timed.record.stage == stage.index]
    is_main = stage.key == "algorithm"
    # Another name for the axis: what is zoomed in one stage is not in the other.
    whose, x_label = ("", "step") if is_main else (" of the warm-up", "step of the warm-up")
    own = [change for change in changes if stage.first_step <= change <= stage.last_step]
    heldout = Series(label="held-out loss", points=_heldout(follower, "loss") if is_main else (), marked=True)
    loss = [Series(label="loss", points=_points(steps, "metrics", "loss")), heldout]
    yield Chart(title=f"Loss{whose}", series=loss, x_label=x_label, changes=own)
    norm = [Series(label="gradient norm", points=_points(steps, "metrics", "grad_norm"))]
    yield Chart(title=f"Gradient norm{whose}", series=norm, x_label=x_label, changes=own, logarithmic=True)


def _heldout(follower: Follower, name: str) -> list[tuple[float, float]]:
    found = ((float(done.version), getattr(done, name)) for done in follower.evaluations)
    return [(version, value) for version, value in found if value is not None]


def _points(steps: Sequence[TimedStep], name: str, key: str | None = None) -> list[tuple[float, float]]:
    """(step, value) of the steps that have one: a field of the record, or what that has under a key."""
    fields = ((float(timed.record.step), getattr(timed.record, name)) for timed in steps)
    found = ((step, field if key is None else field.get(key)) for step, field in fields)
    return [(step, float(value)) for step, value in found if value is not None]


def _throughput(follower: Follower) -> list[Series]:
    """Units per second of each pool over time since the start; no line crosses a gap between sessions."""
    spaced = follower.steps[:: max(1, len(follower.steps) // _RATE_POINTS)]
    found: dict[str, list[tuple[float, float | None]]] = {"rollout": [], "policy": []}
    for pair in itertools.pairwise(spaced):
        paces = follower.timeline.units_per_s(pair)
        middle = (pair[0].time + pair[1].time) / 2 - follower.timeline.sessions[0][0]
        for pool, points in found.items():
            points.append((middle, paces.get(pool)))
    return [Series(label=label, points=points) for label, points in found.items()]


def _planes(pools: Mapping[str, Mapping[str, float]]) -> Iterator[dict[str, Any]]:
    for pool, activities in pools.items():
        # Scores are made beside everything else, several at a time: their sum is no part of the pool's time.
        total = sum(value for name, value in activities.items() if not name.startswith("scoring")) or 1.0
        for activity, seconds in sorted(activities.items(), key=lambda item: -item[1]):
            share = None if activity.startswith("scoring") else min(1.0, seconds / total)
            yield {"pool": pool, "activity": activity, "seconds": seconds, "share": share}


def _comparisons(scored: Sequence[EvaluationRecord], dataset: Dataset, album: Album) -> list[Comparison]:
    """The first held-out rows that were evaluated, those whose reward changed before the others."""
    if not scored:
        return []
    first, last = ({item.row: item for item in record.completions} for record in (scored[0], scored[-1]))

    def is_unchanged(row: int) -> bool:
        return row in first and row in last and first[row].reward == last[row].reward

    rows = sorted(first.keys() | last.keys(), key=lambda row: (is_unchanged(row), row))[:_COMPARED]
    compared = []
    for row in rows:
        try:
            prompt = dataset.row("heldout", row)
        except DataError:
            continue
        before, after = first.get(row), last.get(row)
        compared.append(
            Comparison(
                prompt=prompt.words,
                reference=prompt.reference,
                before=before,
                after=after,
                pictures=tuple(None if each is None else album.picture(each.media) for each in (before, after)),
            )
        )
    return compared


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
