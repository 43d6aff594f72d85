"""Sums up a run: figures for `summary.json`, and the table that is printed at the end."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cosmos_core.config.job import Job, Unit, stages
from cosmos_core.control.live.diagnosis import findings
from cosmos_core.control.live.figures import TimedStep
from cosmos_core.control.machine import changes
from cosmos_core.control.machine.records import EvaluationRecord, StageTotals, score_name
from cosmos_core.control.machine.state import State
from cosmos_core.observe.live import bracketed, clock
from cosmos_core.protocols.algorithm import is_core_metric
from cosmos_core.run.folder import REPORT, SUMMARY
from cosmos_core.run.follower import Follower
from cosmos_core.run.provenance import sources
from cosmos_core.run.supervisor import Ending

_PART = 0.1
"""Of the steps, the first and the last that are averaged."""

_BESIDE = "imitation_"
"""How names of what is measured of demonstrations beside rollouts begin; what follows is the core's, or not."""


def own_measures(steps: Sequence[TimedStep]) -> Mapping[str, list[tuple[float, float]]]:
    """(step, value) of each measure that algorithm or model reports, by name."""
    found: dict[str, list[tuple[float, float]]] = {}
    for timed in steps:
        for name, value in sorted(timed.record.metrics.items()):
            is_own = name == _BESIDE + "loss" or not is_core_metric(name.removeprefix(_BESIDE))
            if is_own and math.isfinite(value):
                found.setdefault(name, []).append((float(timed.record.step), value))
    return found


def begun_and_ended(steps: Sequence[TimedStep]) -> dict[str, dict[str, float]]:
    """The mean of each such measure over the first tenth of the steps, and over the last."""
    found = {}
    for name, points in own_measures(steps).items():
        begin, end = points[0][0], points[-1][0]
        part = max(1, round(_PART * (end - begin + 1)))
        first = [value for step, value in points if step < begin + part]
        last = [value for step, value in points if step > end - part]
        found[name] = {"first": math.fsum(first) / len(first), "last": math.fsum(last) / len(last)}
    return found


_SPLITS: Final = {"train": "train rows", "heldout": "held-out rows"}


def rows_of(job: Job, totals: Sequence[StageTotals]) -> dict[str, Any]:
    """Counts of the dataset's rows, and of those that could not be used.

    Returns:
        `train` and `heldout`: how many rows have a number; `left_out`: of each split, the number of rows that have
        none, by reason, and where the first is; `imitation_dropped`: how often a demonstration to be imitated beside
        rollouts could not be, by reason. Prompts that were dropped when their turn came are counted with the prompts.
    """
    beside: Counter[str] = sum((Counter(total.dropped) for total in totals), Counter())
    return {
        "train": job.num_train_rows,
        "heldout": job.num_heldout_rows,
        "left_out": {
            split: {each.reason: {"rows": each.num_rows, "first": each.first} for each in job.omitted.get(split, ())}
            for split in ("train", "heldout")
        },
        "imitation_dropped": {reason: round(beside[reason]) for reason in sorted(beside)},
    }


def unused(summary: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Counts of what was not used, samples apart, by reason."""
    rows = summary["rows"]
    told = [("prompts dropped", summary["prompts"]["dropped"])]
    told += [
        (f"{words} left out", {reason: each["rows"] for reason, each in rows["left_out"][split].items()})
        for split, words in _SPLITS.items()
    ]
    told.append(("demonstrations dropped", rows["imitation_dropped"]))
    measured = [each["dropped"] for each in summary["evaluations"] if "loss" in each]
    told.append(("held-out rows dropped", measured[-1] if measured else {}))
    yield from ((label, counts) for label, counts in told if counts)


UNUSED: Final = "unused at the end"


def summarise(job: Job, follower: Follower, ending: Ending, *, wall_s: float) -> dict[str, Any]:
    """The summary of a run, as plain data.

    `wall_s` counts from the command to the end, sessions before a resume included, as `planes` does.
    """
    state = follower.state
    evaluations = follower.evaluations
    score = score_name((each for each in evaluations if not each.outdated), job.unit)
    ledgers = state.ledgers if state else ()
    totals = [ledger.totals for ledger in ledgers]
    saved, failed = (state.checkpoints.saved, state.checkpoints.failed) if state else ({}, {})
    return {
        "name": job.recipe.run.name,
        "run_id": job.run_id,
        "outcome": ending.outcome,
        "reason": ending.reason,
        "seed": job.recipe.run.seed,
        "mode": job.recipe.sync.mode,
        "steps": state.step if state else 0,
        "planned_steps": state.settings.last_step if state else None,
        "wall_s": round(wall_s, 3),
        "running_s": None if follower.timeline.is_recovered else round(follower.timeline.elapsed_s(None), 3),
        "unit": job.unit,
        "score": score,
        **_heldout(state, evaluations, score, job.unit),
        "evaluations": [_evaluation(each, score, job.unit) for each in evaluations],
        "findings": [attrs.asdict(each) for each in findings(state)] if state else [],
        "samples": _samples(follower, ending),
        "prompts": {
            "consumed": sum(ledger.consumed for ledger in ledgers),
            "dropped": dict(sum((Counter(ledger.dropped) for ledger in ledgers), Counter())),
        },
        "rows": rows_of(job, totals),
        rates_key(job.unit): _units_per_s(follower),
        "staleness": _staleness(totals),
        "measures": begun_and_ended(of_main_stage(follower)),
        "stages": _stages(job, follower),
        "skipped_steps": sum(total.skipped for total in totals),
        "weights": {name: follower.loads[name] for name in _WEIGHTS},
        "restarts": {name: number for name, number in sorted(follower.timeline.restarts.items()) if number},
        "settings": _settings(state),
        "planes": follower.spent.planes(),
        "checkpoints": {str(step): path for step, path in sorted(saved.items())},
        "failed_checkpoints": {str(step): why for step, why in sorted(failed.items())},
        "problems": dict(sorted(state.status_details.items())) if state else {},
    }


def rates_key(unit: Unit) -> str:
    """Key of the summary that holds the throughput of each pool."""
    return f"{unit}s_per_s".replace(" ", "_")


def heldout_names(score: str, unit: Unit) -> tuple[str, ...]:
    """Figures of evaluations that the summary tells; only a loss of tokens has a perplexity."""
    return (score, "loss", *(("perplexity",) if unit == "token" else ()))


def _heldout(state: State | None, evaluations: Sequence[EvaluationRecord], score: str, unit: Unit) -> dict[str, Any]:
    """The evaluation before the main stage and the last one after a step of it, and notes on each.

    Figures of an evaluation that was not made, scored nothing, or does not compare any more, are None.
    """
    first_version, last = (state.settings.main.first_version, state.step) if state else (0, 0)
    found: dict[str, Any] = {}
    notes: dict[str, list[str]] = {}
    for name in heldout_names(score, unit):
        known = [each for each in evaluations if each.is_of_rollouts == (name == score)]
        before = next((each for each in known if each.version <= first_version), None)
        after = next((each for each in reversed(known) if each.version > first_version and not each.outdated), None)
        for when, done in (("before", before), ("after", after)):
            found[f"heldout_{name}_{when}"] = None if not done or done.outdated else _written(getattr(done, name))
            if done and (told := _notes(done, first_version, last)):
                notes[f"{name}_{when}"] = told
    return {**found, "heldout_notes": notes}


def _notes(done: EvaluationRecord, first_version: int, last: int) -> list[str]:
    if done.outdated:
        return [f"{key} changed at step {step}" for key, step in done.outdated.items()]
    notes = [f"at step {done.version}"] if first_version < done.version < last else []
    return [*notes, done.unscored] if done.is_of_rollouts and done.unscored else notes


def _evaluation(record: EvaluationRecord, score: str, unit: Unit) -> dict[str, Any]:
    if record.is_of_rollouts:
        found = {"step": record.version, score: getattr(record, score), "unscored": record.num_unscored}
        return found | ({"outdated": record.outdated} if record.outdated else {})
    perplexity = {"perplexity": _written(record.perplexity)} if unit == "token" else {}
    return {
        "step": record.version,
        "loss": _written(record.loss),
        **perplexity,
        "units": record.num_units,
        "rows": record.num_prompts - record.num_unscored,
        "unusable": record.num_unscored,
        "dropped": dict(sorted(record.dropped.items())),
    }


def _written(value: float | None) -> float | None:
    """A number that JSON can hold; a loss that is none is absent."""
    return value if value is not None and math.isfinite(value) else None


def _samples(follower: Follower, ending: Ending) -> dict[str, Any]:
    """Generated = consumed + dropped; what was generated and never batched counts as dropped once the run is over.

    `trained` are those consumed that had a part in the gradient: not of skipped steps, nor of advantage 0 without use.
    `wasted_units` were generated for what was dropped; `wasted_s` is what that took, by the mean pace of the run.
    `stale_units` are those of what was dropped as stale.
    """
    ledgers = follower.state.ledgers if follower.state else ()
    counts = [ledger.samples for ledger in ledgers]
    generated, consumed = sum(each.generated for each in counts), sum(each.consumed for each in counts)
    units, wasted = sum(each.units for each in counts), sum(each.wasted for each in counts)
    dropped = sum((Counter(each.dropped) for each in counts), Counter())
    rest = generated - consumed - sum(dropped.values())
    if rest and ending.outcome:
        dropped[UNUSED] += rest
        wasted += sum(ledger.held_units for ledger in ledgers)
    return {
        "generated": generated,
        "consumed": consumed,
        "trained": sum(ledger.totals.trained for ledger in ledgers),
        "dropped": dict(sorted(dropped.items())),
        "units": units,
        "wasted_units": wasted,
        "stale_units": sum(each.stale for each in counts),
        "wasted_s": round(follower.spent.generation_s * wasted / max(1, follower.generated), 3),
    }


def stale_words(samples: Mapping[str, Any], unit: Unit) -> Iterator[tuple[str, str]]:
    """The share of samples that were dropped as stale, and how long they are beside others; nothing if none was."""
    if number := samples["dropped"].get("stale", 0):
        size = samples["stale_units"] / number
        kept = (samples["units"] - samples["wasted_units"]) / max(1, samples["consumed"])
        words = f"of samples dropped as stale, of {size:,.0f} {unit}s each; those consumed have {kept:,.0f}"
        yield f"{number / samples['generated']:.1%}", words


def _settings(state: State | None) -> list[dict[str, Any]]:
    """Changes of dynamic keys, each with the first step that goes by it."""
    if state is None:
        return []
    return [
        attrs.asdict(change) | {"step": changes.first_step(state.settings, change.key, change.step)}
        for change in state.changes
    ]


def of_main_stage(follower: Follower) -> list[TimedStep]:
    """The steps that are known of the main stage."""
    first = follower.state.settings.main.first_version if follower.state else 0
    return [timed for timed in follower.steps if timed.record.step > first]


def _units_per_s(follower: Follower) -> dict[str, float | None]:
    """Units of each pool per second of the main stage, waiting included."""
    known = follower.timeline.units_per_s(of_main_stage(follower))
    if follower.state is not None and not follower.state.settings.rollout_replicas:
        known.pop("rollout", None)
    return {pool: round(known[pool], 1) if pool in known else None for pool in ("policy", "rollout")}


_WEIGHTS: Final = ("loads", "bytes", "relayed_bytes", "spared_bytes", "delta_loads")
"""Bytes that rollout replicas loaded, how many of these they got from one another, and how many were not sent.

With `sync.delta`, loads without any of the last came whole (or were mapped).
"""


def _stages(job: Job, follower: Follower) -> list[dict[str, Any]]:
    """Steps and seconds of each stage, from the step before it to its last one; time between sessions not counted."""
    found = []
    for stage in stages(job.recipe):
        steps = follower.state.ledgers[stage.index].totals.steps if follower.state is not None else 0
        times = [timed.time for timed in follower.steps if stage.first_step <= timed.record.step <= stage.last_step]
        pairs = [(a, b) for a, b in itertools.pairwise(times) if follower.timeline.is_one_session(a, b)]
        seconds = round(sum(last - first for first, last in pairs), 3)
        found.append({"algorithm": stage.label, "steps": steps, "seconds": seconds})
    return found


def _staleness(totals: Sequence[StageTotals]) -> dict[str, float | None]:
    number = sum(total.samples for total in totals)
    if not number:
        return {"mean": None, "max": None}
    mean = sum(total.staleness for total in totals) / number
    return {"mean": round(mean, 4), "max": max(total.staleness_max for total in totals)}


def print_summary(summary: Mapping[str, Any], job: Job, console: Console) -> None:
    """Print before and after, where the time went, what was dropped, and where the files are."""
    colour = {"finished": "green", "stopped": "yellow"}.get(str(summary["outcome"]), "red")
    title = Text.assemble((str(summary["name"]), "bold"), " ", (str(summary["outcome"]), f"bold {colour}"))
    title.append(f" after {summary['steps']} of {summary['planned_steps']} steps in {'; '.join(durations(summary))}")
    console.print()
    console.print(title)
    if summary["reason"]:
        console.print(Text(str(summary["reason"]), style=colour))
    for each in summary["findings"]:
        console.print(Text(f"{each['code']}: {each['text']}; {each['advice']}", style="yellow"))
    console.print(_figures(summary))
    if summary["planes"]:
        table = _grid(f"\n{where_title(summary)} (s)")
        table.add_column(justify="right")
        for pool, activities in summary["planes"].items():
            for activity, seconds in sorted(activities.items(), key=lambda item: -item[1]):
                table.add_row(pool, activity, f"{seconds:.1f}")
        console.print(table)
    console.print(_files(job, str(summary["outcome"]), str(summary["reason"])))


def durations(summary: Mapping[str, Any]) -> list[str]:
    """The time for which the run went on, as the live figures tell it; with starting and ending where that is more."""
    wall_s, running_s = summary["wall_s"], summary["running_s"] or summary["wall_s"]
    more = [f"{clock(wall_s)} with starting and ending"] if running_s < wall_s - 1.0 else []
    return [clock(running_s), *more]


def _grid(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def _figures(summary: Mapping[str, Any]) -> Table:
    table = _grid("\nResult")
    unit: Unit = summary["unit"]
    score = summary["score"]
    if any(score in evaluation for evaluation in summary["evaluations"]):
        table.add_row(f"held-out {score}", _before_and_after(summary, score))
    measured = [evaluation for evaluation in summary["evaluations"] if "loss" in evaluation]
    if measured:
        perplexity = summary.get("heldout_perplexity_after")
        words = "" if perplexity is None else f" (perplexity {perplexity:.3f})"
        table.add_row("held-out loss", _before_and_after(summary, "loss") + words)
        newest = measured[-1]
        unusable = f", {newest['unusable']} unusable" if newest["unusable"] else ""
        table.add_row("held-out", f"{newest['rows']:,} demonstrations, {newest['units']:,} {unit}s{unusable}")
    samples = summary["samples"]
    if samples["generated"]:
        words = "{generated:,} generated, {consumed:,} consumed, {trained:,} of them trained on"
        table.add_row("samples", words.format_map(samples))
        table.add_row("samples dropped", Text(_dropped(samples, unit)))
    for label, counts in unused(summary):
        table.add_row(label, Text(_counted(counts)))
    rates = ", ".join(f"{pool} {rate:,.0f}" for pool, rate in summary[rates_key(unit)].items() if rate is not None)
    if rates:
        table.add_row(f"mean {unit}s/s", rates)
    staleness = summary["staleness"]
    if staleness["mean"] is not None:
        table.add_row("staleness", f"mean {staleness['mean']:.2f}, max {staleness['max']}")
    if summary["restarts"]:
        table.add_row("started again", ", ".join(f"{name} {n}x" for name, n in summary["restarts"].items()))
    for name, mean in summary["measures"].items():
        table.add_row(name.replace("_", " "), f"{mean['first']:.4g} → {mean['last']:.4g}")
    for label, what in _happenings(summary):
        # What an error says may look like markup, such as a path in brackets.
        table.add_row(label, Text(what))
    return table


def _dropped(samples: Mapping[str, Any], unit: Unit) -> str:
    """Dropped samples by reason, and what was wasted on them."""
    words = _counted(samples["dropped"]) or "none"
    if wasted := samples["wasted_units"]:
        share = f"{wasted:,} {unit}s, {wasted / samples['units']:.1%} of all"
        words += f" (wasted: {share}, about {samples['wasted_s']:,.1f} s of generation)"
    return "\n".join((words, *map(" ".join, stale_words(samples, unit))))


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def _happenings(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Events that not every run has."""
    for change in summary["settings"]:
        yield "set while it ran", "{key}: {before} → {after} from step {step} on".format_map(change)
    if summary["skipped_steps"]:
        yield "steps skipped", f"{summary['skipped_steps']} (gradient not finite)"
    for step, why in summary["failed_checkpoints"].items():
        yield "checkpoint failed", f"step {step}: {why}"
    for status, why in summary["problems"].items():
        yield f"problem: {status}", why


def heldout_words(summary: Mapping[str, Any], name: str, when: str) -> tuple[str, str]:
    """(value, label) of a held-out figure `before` or `after`."""
    value, notes = summary[f"heldout_{name}_{when}"], summary["heldout_notes"].get(f"{name}_{when}", ())
    told = [each for each in summary["evaluations"] if name in each]
    if value is not None:
        text = f"{value:.{4 if name == 'loss' else 3}f}"
    elif when == "before" and told and "outdated" in told[0]:
        text = "not comparable"
    else:
        is_number = name == summary["score"] or all(each[name] is not None for each in told)
        text = "not measured" if is_number else "not finite"
    return text, when + bracketed(*notes)


def _before_and_after(summary: Mapping[str, Any], name: str) -> str:
    return " → ".join(" ".join(heldout_words(summary, name, when)) for when in ("before", "after"))


def where_title(summary: Mapping[str, Any]) -> str:
    """The heading of the seconds by activity: nothing is known of those before a recovery."""
    return "Where the time went" + (" since the recovery" if summary["running_s"] is None else "")


def _files(job: Job, outcome: str, reason: str) -> Table:
    table = _grid("\nFiles")
    table.add_row("run", str(job.directory))
    table.add_row("summary", str(job.directory / SUMMARY))
    table.add_row("report", str(job.directory / REPORT))
    table.add_row("checkpoints", job.checkpoints)
    table.add_row("logs", str(job.logs))
    # A reason may name the command that goes on, such as from before a damaged checkpoint, or a reward.
    named = re.search(rf"cosmos (run --resume|recover) {re.escape(str(job.directory))} --(from|step) \S+", reason)
    usual = f"cosmos {'export' if outcome == 'finished' else 'run --resume'} {job.directory}"
    for label, setting, _ in sources(job):
        if setting and re.search(rf"\breward(_failed:)? {re.escape(label)}: ", reason):
            usual += f" {setting}"
    table.add_row("next", named[0] if named else usual)
    return table
