"""Journals that are damaged or gone, and what the run goes on from."""

import errno
import os
from pathlib import Path

import pytest

from cosmos_core.config.loading import save_job
from cosmos_core.control import journal, recovery_snapshots
from cosmos_core.control.__main__ import restore
from cosmos_core.control.journal import Journal, entries, replay
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import Recovered, Resumed
from cosmos_core.control.recovery_snapshots import RecoverySnapshots
from cosmos_core.errors import ConfigError, DamagedJournalError, JournalError
from cosmos_core.run.follower import Follower
from cosmos_service_tools import auditor as auditing
from cosmos_service_tools import recovery as recovering
from cosmos_service_tools.auditor import audit


@pytest.fixture
def run(job, history, put_checkpoint):
    """A run of 9 steps with checkpoints of steps 4, 8 and 9, on disk, and the snapshots that its controller kept."""
    job.directory.mkdir(parents=True)
    save_job(job)
    snapshots = RecoverySnapshots(job.recovery_snapshots, keep=2)
    history.join()
    while not history.state.outcome:
        before = len(history.entries)
        history.work(until=history.state.step + 1)
        snapshots.note(history.state)
        if len(history.entries) == before:
            break
    with Journal(job.journal) as journal:
        for _, _, event in history.entries:
            journal.append(event)
        journal.commit()
    for step in history.state.checkpoints.saved:
        put_checkpoint(job, step, generation=history.state.generation_number)
    return history


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_snapshots_are_kept_of_the_newest_checkpoints(job, run):
    assert run.state.outcome == "finished"
    steps = sorted(run.state.checkpoints.saved)
    assert len(steps) > 2
    kept = recovery_snapshots.kept(job.recovery_snapshots)
    assert kept[-2:] == steps[-2:]
    snapshot = recovery_snapshots.read(job.recovery_snapshots, steps[-1])
    assert snapshot.steps == tuple(run.state.steps)
    assert snapshot.mark == run.state.marks[steps[-1]]

    # A journal that lost the generation of a snapshot is not gone on with.
    state = replay(job.journal)
    recovery_snapshots.require_known(job.recovery_snapshots, state)
    state.generation_number -= 1
    with pytest.raises(DamagedJournalError, match=r"it ends at step 9, and has not what .*/step-8 is of"):
        recovery_snapshots.require_known(job.recovery_snapshots, state)


def test_a_run_goes_on_from_its_newest_checkpoint_with_a_new_journal(job, run):
    flip(job.journal)
    with pytest.raises(DamagedJournalError, match=f"cosmos recover {job.directory}"):
        replay(job.journal)
    done = recovering.recover(job.directory)
    newest = max(run.state.checkpoints.saved)
    assert done.step == newest
    assert done.checkpoint == recovering.path_of(job.checkpoints, newest)
    assert done.aside is not None
    assert done.aside.exists()
    state = replay(job.journal)
    assert state.step == newest
    assert state.steps == run.state.steps
    assert [ledger.consumed for ledger in state.ledgers] == [ledger.consumed for ledger in run.state.ledgers]
    # Nothing that was said under the lost journal can be mistaken for what is said now.
    assert state.term > run.state.term
    assert state.next_lease > run.state.next_lease
    assert state.generation_number > run.state.generation_number
    follower = Follower()
    follower.fold(entries(job.journal))
    assert [timed.record for timed in follower.steps] == run.state.steps


def test_an_older_checkpoint_can_be_chosen_and_the_rest_is_trained_again(job, run, open_history):
    flip(job.journal)
    older = recovery_snapshots.kept(job.recovery_snapshots)[-2]
    recovering.recover(job.directory, step=older)
    ((_, _, event),) = entries(job.journal)
    assert isinstance(event, Recovered)
    again = open_history(job)
    again.entries, again.state = [(1, 1000.0, event)], core.begin(event)
    again.world = run.world
    again.append(Resumed(step=older, settings=again.settings))
    again.start()
    again.join(step=older)
    again.work()
    assert again.state.outcome == "finished"
    found = audit(again.entries)
    assert found.problems == ()
    assert [batch.step for batch in found.batches] == list(range(older + 1, 10))
    assert found.stages[1].before > 0
    with pytest.raises(ConfigError, match="can be read; go on with cosmos run --resume"):
        recovering.recover(job.directory)


def test_a_journal_that_is_gone_is_not_taken_for_a_new_run(job, run):
    job.journal.unlink()
    with pytest.raises(DamagedJournalError, match=r"is gone, or empty, .*; cosmos recover .* goes on"):
        recovery_snapshots.require_known(job.recovery_snapshots, None)
    done = recovering.recover(job.directory)
    assert done.aside is None
    assert replay(job.journal).step == done.step

    # An empty journal is not a new run where there are snapshots.
    job.journal.unlink()
    with Journal(job.journal) as journal, pytest.raises(DamagedJournalError, match="is gone, or empty"):
        restore(journal, job, None)
    assert recovering.recover(job.directory).step == 9
    # A log whose journal is gone is kept aside with it.
    for path in job.directory.glob("*.damaged-*"):
        path.unlink()
    log = job.journal.with_name(f"{job.journal.name}-wal")
    log.write_bytes(b"what SQLite had not brought into the file")
    job.journal.unlink()
    done = recovering.recover(job.directory)
    assert done.aside.with_name(f"{done.aside.name}-wal").read_bytes().startswith(b"what SQLite")
    assert replay(job.journal).step == done.step


def test_a_damaged_snapshot_is_passed_over_and_named_if_it_is_the_last(job, run):
    flip(job.journal)
    kept = recovery_snapshots.kept(job.recovery_snapshots)
    flip(job.recovery_snapshots / f"step-{kept[-1]}")
    with pytest.raises(JournalError, match=f"step-{kept[-1]}: is damaged"):
        recovering.recover(job.directory, step=kept[-1])
    with pytest.raises(ConfigError, match="--step 3: no such checkpoint; can be recovered: "):
        recovering.recover(job.directory, step=3)
    marker = Path(recovering.path_of(job.checkpoints, kept[-2])) / "complete.json"
    flip(marker)
    with pytest.raises(JournalError, match=r"step-9: is damaged.*; .*step-8/complete\.json is damaged"):
        recovering.recover(job.directory)
    flip(marker)
    done = recovering.recover(job.directory)
    assert done.step == kept[-2]
    assert [f"step-{kept[-1]}: is damaged" in note for note in done.notes] == [True]


@pytest.fixture
def shortened(job, run):
    """The run, whose journal has lost all after step 6 without a trace; its snapshots are of steps 8 and 9."""
    job.journal.unlink()
    with Journal(job.journal) as journal:
        state = None
        for _, _, event in run.entries:
            state = core.fold((event,), state)
            if state.step > 6:
                break
            journal.append(event)
        journal.commit()
    return replay(job.journal)


def test_a_journal_that_lost_what_a_snapshot_is_of_is_not_gone_on_with(job, shortened):
    assert (shortened.step, shortened.undone) == (6, 0)
    before, size = recovery_snapshots.kept(job.recovery_snapshots), job.journal.stat().st_size
    lost = rf"lost entries: it ends at step 6, and has not what .*/step-8 is of; cosmos recover {job.directory}"
    with pytest.raises(DamagedJournalError, match=lost):
        RecoverySnapshots(job.recovery_snapshots, keep=2).note(shortened)
    for step in (None, 4):
        with Journal(job.journal) as journal, pytest.raises(DamagedJournalError, match=lost):
            restore(journal, job, step)
    with pytest.raises(DamagedJournalError, match=lost):
        auditing.audit_run(job.directory)
    assert recovery_snapshots.kept(job.recovery_snapshots) == before
    assert job.journal.stat().st_size == size
    assert recovering.recover(job.directory).step == 9
    assert auditing.audit_run(job.directory).problems == ()
    with Journal(job.journal) as journal:
        assert restore(journal, job, 9)[0].step == 9


def test_snapshots_of_what_the_journal_says_was_undone_are_no_damage(job, run):
    flip(job.recovery_snapshots / "step-9")  # that of step 8 can be read
    with Journal(job.journal) as journal:
        journal.append(Resumed(step=4, settings=run.settings))
        journal.commit()
        # The controller was killed before it removed them.
        state, _ = restore(journal, job, None)
    assert state.step == 4
    assert recovery_snapshots.kept(job.recovery_snapshots)[-1] == 9
    RecoverySnapshots(job.recovery_snapshots, keep=2).note(state)
    assert max(recovery_snapshots.kept(job.recovery_snapshots)) == 4


def test_without_a_snapshot_nothing_is_touched(job, run):
    flip(job.journal)
    for path in job.recovery_snapshots.iterdir():
        path.unlink()
    with pytest.raises(JournalError, match="no checkpoint has a snapshot"):
        recovering.recover(job.directory)
    assert job.journal.exists()


def test_snapshots_of_what_was_undone_are_no_damage_and_removed(job, run):
    # Snapshots of steps that were undone are removed.
    snapshots = RecoverySnapshots(job.recovery_snapshots, keep=2)
    snapshots.note(run.state)
    later = max(recovery_snapshots.kept(job.recovery_snapshots))
    step = min(recovery_snapshots.kept(job.recovery_snapshots))
    assert step < later
    run.state.rollbacks.append(step)
    run.state.step, run.state.undone = step, run.state.generation_number
    run.state.checkpoints.saved.clear()
    snapshots.note(run.state)
    assert recovery_snapshots.kept(job.recovery_snapshots) == [step]


def test_snapshots_that_cannot_be_changed_stop_the_run(job, run, monkeypatch, tmp_path):
    # A snapshot that cannot be removed stops the run.
    run.state.step, run.state.undone = 0, run.state.generation_number
    path = job.recovery_snapshots / "step-5"
    path.mkdir()
    with pytest.raises(JournalError, match=r"step-5 cannot be removed .* make the folder writable"):
        RecoverySnapshots(job.recovery_snapshots, keep=2).note(run.state)

    # A log that cannot be read is an error of the journal.
    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    job.journal.with_name(f"{job.journal.name}-wal").touch()
    monkeypatch.setattr(journal, "lost_at", fail)
    with pytest.raises(JournalError, match=r"journal\.sqlite-wal: Input/output error; make sure .*its disk works"):
        replay(job.journal)
    # A snapshot that cannot be written stops the run.
    in_the_way = tmp_path / "snapshots"
    in_the_way.write_text("a file")
    with pytest.raises(JournalError, match=r"cannot be written .* free some space"):
        RecoverySnapshots(in_the_way, keep=2).note(run.state)


def test_a_second_recovery_from_an_older_checkpoint_says_no_number_again(job, run):
    flip(job.journal)
    newest = recovering.recover(job.directory).step
    with Journal(job.journal) as journal:
        state, _ = restore(journal, job, newest)
    state.generation_number += 1  # its gradient group was formed
    RecoverySnapshots(job.recovery_snapshots, keep=2).note(state)
    job.journal.rename(job.journal.with_name("away"))
    older = recovering.recover(job.directory, step=recovery_snapshots.kept(job.recovery_snapshots)[0])
    assert older.step < newest
    assert recovering.damage(job) == ""
    with Journal(job.journal) as journal:
        again, _ = restore(journal, job, older.step)
    assert again.term > state.term
    assert again.generation_number > state.generation_number
    assert again.next_lease > state.next_lease


def test_a_snapshot_that_cannot_be_read_is_a_witness_too(job, shortened):
    for step in recovery_snapshots.kept(job.recovery_snapshots):
        flip(job.recovery_snapshots / f"step-{step}")
    assert "has lost entries" in recovering.damage(job)
