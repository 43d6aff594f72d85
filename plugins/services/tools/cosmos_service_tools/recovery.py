"""Goes on from a checkpoint where the journal cannot be read: it is replaced, and kept aside."""

from __future__ import annotations

import contextlib
import itertools
import time
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
from cosmos_core.policy.checkpoints.checkpoint import completed, path_of, require_whole
from cosmos_core.run import folder
from cosmos_core.run.address import require_gone
from cosmos_core.run.follower import Follower
from cosmos_core.run.resume import beside, find_start

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
        if not found and step is not None and step not in beside(job):
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
