"""Prints the audit of a run, for people and as JSON."""

from __future__ import annotations

import json
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from cosmos_core.control.machine.recovery import since_recovery
from cosmos_core.errors import ConfigError
from cosmos_core.run.report.summary import UNUSED
from cosmos_core.transport.directives import GroupRef
from cosmos_service_tools.auditor import Audit, Batch


def show(found: Audit, console: Console) -> None:
    """Print what became of the prompts of each stage, and what does not add up."""
    console.print(
        f"Audit of {found.run_id}: {found.entries:,} entries, {found.terms:,} start(s) of the controller, "
        f"{found.lost:,} replica(s) lost, {len(found.batches):,} step(s) on record"
        + (f", {found.undone:,} more were applied and then given up" if found.undone else ""),
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    rest = UNUSED if found.outcome else "live"
    for column in ("stage", "prompts given out", "consumed", "dropped", rest):
        table.add_column(column, justify="right")
    for index, stage in enumerate(found.stages):
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(stage.dropped.items()))
        table.add_row(str(index), f"{stage.given_out:,}", f"{stage.consumed:,}", reasons or "none", f"{stage.live:,}")
    console.print(table)
    for index, stage in enumerate(found.stages):
        if stage.before:
            console.print(f"Of stage {index}, {stage.before:,} ended before the journal was recovered: not proven.")
    for problem in found.problems:
        console.print(f"  {problem}", highlight=False, markup=False, style="red")
    scope = "Each prompt that ended on record" if any(stage.before for stage in found.stages) else "Each prompt"
    verdict = f"{scope} was consumed exactly once, or dropped with a reason, or is {rest}."
    if found.problems:
        verdict = f"{len(found.problems)} problem(s): the accounting of this run is broken."
    console.print(verdict, highlight=False)


def batch_of(found: Audit, step: int) -> Batch:
    """The batch of a step; raises ConfigError if the step is not on record."""
    for batch in found.batches:
        if batch.step == step:
            return batch
    known = f"{found.batches[0].step} to {found.batches[-1].step}" if found.batches else "none"
    raise ConfigError(f"--step {step}: is not on record; on record: {known}")


def show_batch(batch: Batch, console: Console) -> None:
    """Print what a step was trained on."""
    generation = since_recovery(batch.generation)
    console.print(
        f"Step {batch.step} of stage {batch.stage}: attempt {batch.attempt}, generation {generation} "
        f"({', '.join(batch.members)}), entry {batch.sequence:,}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("prompt", "row", "lease", "samples", "versions", "rewards"):
        table.add_column(column, justify="right")
    for group in batch.groups:
        table.add_row(*_row(group, batch.dropped.get(group.position, "")))
    console.print(table)


def as_json(found: Audit) -> str:
    """The whole audit, each step's batch included, as JSON."""
    whole = attrs.asdict(found, recurse=False)
    data = {name: whole[name] for name in ("run_id", "entries", "terms", "lost", "undone", "outcome", "problems")}
    data["stages"] = [attrs.asdict(stage) for stage in found.stages]
    data["steps"] = [_step(batch) for batch in found.batches]
    return json.dumps(data, indent=1)


def _step(batch: Batch) -> dict[str, Any]:
    known = attrs.asdict(batch, recurse=False)
    prompts = [
        {
            "position": group.position,
            "row": group.row,
            "lease": group.lease,
            "dropped": batch.dropped.get(group.position),
            "samples": [
                {
                    "status": sample.status,
                    "reward": sample.reward,
                    "units": sample.num_units,
                    "versions": [sample.oldest_version, sample.newest_version],
                }
                for sample in group.samples
            ],
        }
        for group in batch.groups
    ]
    told = {name: known[name] for name in ("step", "stage", "attempt", "generation", "members")}
    return {**told, "entry": batch.sequence, "time": batch.time, "prompts": prompts}


def _row(group: GroupRef, dropped: str) -> tuple[str, ...]:
    place = (str(group.position), str(group.row), str(group.lease) if group.lease >= 0 else "")
    if not group.samples:
        return (*place, dropped or "demonstration", "", "")
    oldest = min(sample.oldest_version for sample in group.samples)
    newest = max(sample.newest_version for sample in group.samples)
    rewards = " ".join("-" if sample.reward is None else f"{sample.reward:g}" for sample in group.samples)
    return (*place, str(len(group.samples)), f"{oldest}" if oldest == newest else f"{oldest}-{newest}", rewards)
