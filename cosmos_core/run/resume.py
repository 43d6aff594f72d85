"""Finds the checkpoint that a run goes on from: the newest, or one that is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from cosmos_core.config.job import Job
from cosmos_core.control import recovery_snapshots
from cosmos_core.control.journal import entries
from cosmos_core.control.machine.state import State
from cosmos_core.errors import ConfigError, DamagedCheckpointError
from cosmos_core.policy.checkpoints.checkpoint import completed, path_of, read_place, require_whole
from cosmos_core.run.follower import Follower


@attrs.frozen(kw_only=True)
class Start:
    """The start of a run: `step` and the checkpoint's path; both None for a new run, path None for step 0."""

    step: int | None = None
    checkpoint: str | None = None


def find_start(job: Job, follower: Follower, wanted: str | None) -> tuple[Start, list[str]]:
    """Find where a run goes on by its journal, which the follower reads; and words on what that undoes.

    That is at the newest checkpoint that the run came to, or at the one that is wanted, `step-N` or `previous`. Others
    may be there: of steps that a recovered journal has lost, or that were undone before they were on record.
    """
    if job.journal.exists():
        follower.fold(entries(job.journal))
    state = follower.state
    recovery_snapshots.require_known(job.recovery_snapshots, state)
    if state is None:
        if wanted is not None:
            raise ConfigError(f"{wanted}: {job.directory} has not begun, and has no checkpoint")
        return Start(), []
    complete = completed(job.checkpoints)
    steps = _resumable(job, state, complete)
    step = _chosen(job, steps, wanted)
    start = Start(step=step, checkpoint=path_of(job.checkpoints, step) if step or step in complete else None)
    if start.checkpoint is not None:
        try:
            require_whole(start.checkpoint)
        except DamagedCheckpointError as error:
            earlier = [each for each in steps if each < step]
            remedy = _instead(job, earlier, is_newest=step == steps[-1])
            raise DamagedCheckpointError(f"{error}; {remedy}") from error
    return start, _undone(job, state, step, complete)


def _instead(job: Job, earlier: Sequence[int], *, is_newest: bool) -> str:
    """The way to go on without a damaged checkpoint, in words.

    Args:
        job: The run's.
        earlier: Steps of the checkpoints before it, oldest first; 0 is the run's beginning.
        is_newest: Whether the run has none after it.
    """
    run = job.directory
    if not earlier and (lost := beside(job)):
        return f"cosmos recover {run} --step {lost[-1]} takes the run to the checkpoint of step {lost[-1]}"
    if not earlier:
        return f"there is none before it: restore its files, or make a new run in place of {run}"
    step = earlier[-1]
    start = "previous" if is_newest and step else f"step-{step}"
    where = f"step {step}" if step else "the run's beginning"
    return f"cosmos run --resume {run} --from {start} goes on from {where}"


def _resumable(job: Job, state: State, complete: Sequence[int]) -> list[int]:
    """Steps that a run can go on from, oldest first: 0 is its beginning; of the others there are checkpoints.

    Damaged ones are among them, and the newest on record even if it is gone: who takes one is told.
    """
    found = []
    for step in sorted({0, *complete, max(state.checkpoints.saved, default=0)} & state.marks.keys()):
        try:
            place = read_place(path_of(job.checkpoints, step)) if step else None
            is_genuine = place is None or place.is_genuine(state.marks[step].generation)
        except DamagedCheckpointError:
            is_genuine = True
        if is_genuine:
            found.append(step)
    return found


def beside(job: Job) -> list[int]:
    """Steps of complete checkpoints with a snapshot that a sound journal does not know, as it was recovered since."""
    follower = Follower()
    follower.fold(entries(job.journal))
    complete = completed(job.checkpoints)
    known = _resumable(job, follower.state, complete) if follower.state is not None else []
    return sorted((set(complete) & set(recovery_snapshots.kept(job.recovery_snapshots))) - set(known))


def _chosen(job: Job, steps: Sequence[int], wanted: str | None) -> int:
    """The step that is wanted, of those that a run can go on from; the newest if none is."""
    if wanted is None:
        return steps[-1]
    earlier = [step for step in steps[:-1] if step]
    if wanted == "previous" and earlier:
        return earlier[-1]
    named = next((step for step in steps if wanted in {f"step-{step}", str(step)}), None)
    if named is None:
        there = [f"step-{step}" if step else "step-0 (its beginning)" for step in steps]
        there += [f"previous (step-{earlier[-1]})"] if earlier else []
        further = "".join(f"; cosmos recover {job.directory} --step {step} takes it to that" for step in beside(job))
        raise ConfigError(f"{wanted}: there is no such checkpoint; the run can go on from {', '.join(there)}{further}")
    return named


def _undone(job: Job, state: State, start: int, complete: Sequence[int]) -> list[str]:
    words = []
    if state.step > start:
        evaluated = sorted({done.version for done in state.evaluations if done.version > start})
        besides = f", and the evaluation(s) of step {', '.join(map(str, evaluated))}" if evaluated else ""
        undone = f"{start + 1} to {state.step}" if state.step > start + 1 else f"{state.step}"
        words.append(f"Undone, and done again: step(s) {undone}{besides}")
    if later := [step for step in complete if step > start]:
        words.append(
            f"Passed over: the checkpoint(s) of step {', '.join(map(str, later))} in {job.checkpoints}, whose steps "
            "are undone, or which the journal does not know; they are removed when training goes on"
        )
    return words
