"""Finds the checkpoint that a run goes on from: the newest, one that is asked for, or that of a lost journal.

A journal that cannot be read is replaced, and kept aside.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs

from cosmos_core.config.job import Job
from cosmos_core.config.loading import load_job
from cosmos_core.control import recovery_snapshots
from cosmos_core.control.journal import Journal, entries
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Recovered, Resumed
from cosmos_core.control.machine.recovery import RECOVERY_SNAPSHOT, RecoverySnapshot
from cosmos_core.control.machine.settings import settings_of
from cosmos_core.control.machine.state import State
from cosmos_core.errors import ConfigError, DamagedCheckpointError, DamagedJournalError, JournalError
from cosmos_core.policy.checkpoints.checkpoint import completed, path_of, read_place, require_whole
from cosmos_core.run import folder
from cosmos_core.run.address import require_gone
from cosmos_core.run.follower import Follower

_PARTS: Final = ("", "-wal", "-shm")
"""What SQLite keeps a database in."""


@attrs.frozen(kw_only=True)
class Recovery:
    """The result of a recovery.

    Attributes:
        damage: What was wrong with the journal; empty if nothing was.
        aside: Where it is kept now; None if there was none.
        notes: Why later checkpoints could not be gone on from, or what is undone.
    """

    damage: str
    aside: Path | None
    step: int
    checkpoint: str
    notes: tuple[str, ...]


def damage(job: Job) -> str:
    """The damage that keeps a run from going on with its journal; empty if there is none.

    A JournalError if that cannot be told.
    """
    try:
        state: State | None = None
        for _, _, event in entries(job.journal) if job.journal.exists() else ():
            state = core.fold((event,), state)
        recovery_snapshots.require_known(job.recovery_snapshots, state)
    except DamagedJournalError as error:
        return str(error)
    return ""


def recover(directory: Path, *, step: int | None = None) -> Recovery:
    """Put a new journal in the place of a damaged one, which goes on from a checkpoint.

    The checkpoint is that of `step`; if None the newest that is complete and has a snapshot. A sound journal that knows
    the checkpoint of `step` stays, and goes on from it; one that was recovered may know later ones only.
    """
    with folder.held(directory):
        job = load_job(directory)
        require_gone(job)
        found = damage(job)
        if not found and step is not None and step not in _beside(job):
            return _take_back(job, step)
        if not found and step is None:
            raise ConfigError(f"{job.journal}: can be read; go on with cosmos run --resume {directory}")
        snapshot, passed_over = _snapshot(job, step)
        checkpoint = path_of(job.checkpoints, snapshot.step)
        aside = _set_aside(job.journal)
        with Journal(job.journal) as journal:
            journal.append(Recovered(snapshot=RECOVERY_SNAPSHOT.encode(snapshot), checkpoint=checkpoint))
            journal.commit()
    return Recovery(damage=found, aside=aside, step=snapshot.step, checkpoint=checkpoint, notes=passed_over)


def _take_back(job: Job, step: int) -> Recovery:
    """Note in a sound journal that the run goes on from a checkpoint; whoever resumes it does."""
    start, words = find_start(job, Follower(), f"step-{step}")
    with Journal(job.journal) as journal:
        journal.append(Resumed(step=step, settings=settings_of(job)))
        journal.commit()
    # It may say that the run has finished.
    (job.directory / folder.SUMMARY).unlink(missing_ok=True)
    return Recovery(damage="", aside=None, step=step, checkpoint=start.checkpoint or "none", notes=tuple(words))


def _snapshot(job: Job, wanted: int | None) -> tuple[RecoverySnapshot, tuple[str, ...]]:
    """The snapshot of the newest checkpoint, or of the one that is wanted; and why later ones are of no use."""
    steps = set(completed(job.checkpoints)) & set(recovery_snapshots.kept(job.recovery_snapshots))
    if not steps:
        raise JournalError(
            f"{job.directory}: no checkpoint has a snapshot in {job.recovery_snapshots}, so that there is nothing to "
            "go on from; make a new run (cosmos export RUN, then --set model.path=RUN/export, keeps what was learned)"
        )
    if wanted is not None and wanted not in steps:
        raise ConfigError(
            f"--step {wanted}: no such checkpoint; can be recovered: {', '.join(map(str, sorted(steps)))}"
        )
    problems = []
    for step in [wanted] if wanted is not None else sorted(steps, reverse=True):
        try:
            snapshot = recovery_snapshots.read(job.recovery_snapshots, step)
            place = require_whole(path_of(job.checkpoints, step))
        except (JournalError, DamagedCheckpointError) as error:
            problems.append(str(error))
            continue
        if snapshot.settings.run_id != job.run_id:
            problems.append(f"{job.recovery_snapshots}/step-{step} is of run {snapshot.settings.run_id}")
        elif not place.is_genuine(snapshot.mark.generation):
            problems.append(f"{path_of(job.checkpoints, step)} is of before the step was undone")
        else:
            return _beyond(snapshot, job), tuple(f"Passed over: {problem}" for problem in problems)
    raise JournalError("; ".join(problems))


def _beyond(snapshot: RecoverySnapshot, job: Job) -> RecoverySnapshot:
    """A snapshot with the newest numbers of all of its run: after a second recovery none of them may come again."""
    known = [snapshot]
    for step in recovery_snapshots.kept(job.recovery_snapshots):
        with contextlib.suppress(JournalError):
            known.append(recovery_snapshots.read(job.recovery_snapshots, step))
    known = [each for each in known if each.settings.run_id == snapshot.settings.run_id]
    return attrs.evolve(
        snapshot,
        term=max(each.term for each in known),
        generation_number=max(each.generation_number for each in known),
        next_lease=max(each.next_lease for each in known),
    )


def _set_aside(journal: Path) -> Path | None:
    """Rename a journal and what belongs to it, as much of it as there is; nothing of it is deleted."""
    if not any(journal.with_name(journal.name + part).exists() for part in _PARTS):
        return None
    name = f"{journal.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    aside = next(path for path in map(journal.with_name, names) if not path.exists())
    # The log of SQLite first: a database whose log is gone is an old one, a log whose database is gone is nothing.
    for part in reversed(_PARTS):
        path = journal.with_name(journal.name + part)
        if path.exists():
            path.rename(aside.with_name(aside.name + part))
    return aside


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
    if not earlier and (beside := _beside(job)):
        return f"cosmos recover {run} --step {beside[-1]} takes the run to the checkpoint of step {beside[-1]}"
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


def _beside(job: Job) -> list[int]:
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
        further = "".join(f"; cosmos recover {job.directory} --step {step} takes it to that" for step in _beside(job))
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
