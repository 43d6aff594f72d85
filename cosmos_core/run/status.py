"""`cosmos status`: lines about a run, from its controller while it runs, else from its journal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.job import Job, stages
from cosmos_core.config.loading import load_job
from cosmos_core.control.journal import entries
from cosmos_core.control.live.snapshot import status_of
from cosmos_core.control.machine import changes
from cosmos_core.control.machine.progress import best_checkpoint
from cosmos_core.control.machine.state import State
from cosmos_core.control.recovery_snapshots import require_known
from cosmos_core.observe.live import line
from cosmos_core.policy.checkpoints.checkpoint import completed
from cosmos_core.run import folder
from cosmos_core.run.address import absence, find_address, page_words
from cosmos_core.run.follower import Follower, progress_of
from cosmos_core.run.observer import so_far
from cosmos_core.transport.keys import person_key

INTERRUPTED: Final = "interrupted"


def ended(job: Job, state: State) -> tuple[str, str]:
    """Outcome and reason of a run without a controller; no outcome if its last session came to none."""
    if not state.outcome and (summary := folder.read_summary(job.directory)) is not None:
        # The supervisor ended it, after the controller.
        return summary.outcome, summary.reason
    return state.outcome, state.reason


def interrupted(job: Job) -> str:
    """The line about a run that came to no outcome."""
    return f"{INTERRUPTED}: {absence(job)}; cosmos run --resume goes on"


def look(directory: Path) -> Iterator[str]:
    """Lines about a run, for people."""
    job = load_job(directory)
    follower, gauges = Follower(), dict[str, dict[str, float]]()
    address = find_address(job)
    if address is not None:
        follower.fold(so_far(address, job.run_id, person_key(job.keys), gauges=gauges))
    else:
        follower.fold(entries(job.journal) if job.journal.exists() else ())
        require_known(job.recovery_snapshots, follower.state)
    state = follower.state
    if state is None:
        yield f"{job.recipe.run.name}: not begun yet"
        return
    progress = progress_of(follower, stages(job.recipe), gauges, now=None if address is None else time.time())
    if address is not None:
        reason = state.reason
        verdict = f"running, {state.outcome} in a moment" if state.outcome else "running"
    else:
        outcome, reason = ended(job, state)
        verdict = outcome or interrupted(job)
        progress = attrs.evolve(progress, phase=outcome or INTERRUPTED)
    yield f"{job.recipe.run.name}: {verdict}"
    yield line(progress)
    if address is not None:
        yield from _replicas(state)
        yield from (f"  {words}" for words in page_words(job))
    yield from settings_lines(state)
    best = best_checkpoint(state)
    for step in sorted(state.checkpoints.saved.keys() & set(completed(job.checkpoints))):
        yield f"  checkpoint of step {step}{' (best)' if step == best else ''}: {state.checkpoints.saved[step]}"
    if reason:
        yield reason
    if (job.directory / folder.REPORT).exists():
        yield f"  report: {job.directory / folder.REPORT}"


def _replicas(state: State) -> Iterator[str]:
    for replica in (*state.named("policy"), *state.named("rollout")):
        held = replica.step if replica.role == "policy" else replica.version
        work = f", {len(replica.leases)} prompts in flight" if replica.role == "rollout" else ""
        place = f"pid {replica.pid} on {replica.host}"
        yield f"  {replica.name}: {status_of(state, replica)}, weights of step {max(0, held)}{work}, {place}"
    for name in sorted(state.departed):
        yield f"  {name}: has left, as it was asked to"
    yield from (f"  {words}" for words in _lost(state))


def _lost(state: State) -> list[str]:
    """Replicas that were lost and have not come back, each with the newest reason."""
    reasons = {words.partition(": ")[0]: words for words in state.fenced.values()}
    return [words for name, words in reasons.items() if name not in state.replicas and name not in state.departed]


def settings_lines(state: State) -> Iterator[str]:
    """Dynamic keys that are not as in the recipe, or will not be from a step on."""
    recipe = {each.key: each.value for each in state.settings.dynamic}
    newest = {change.key: change for change in state.changes}
    for key, change in sorted(newest.items()):
        step = changes.first_step(state.settings, key, change.step)
        has_come = step <= state.step + 1
        if not (has_come and change.after == recipe.get(key)):
            yield f"  {key} = {change.after} {'since' if has_come else 'from'} step {step} (recipe: {recipe.get(key)})"
