"""Going back to a checkpoint: a rollback of a run that lost all policy replicas, a resume, recovery of a lost journal.

The weights of a step live in the policy replicas that hold them, in its checkpoint, and those of step 0 wherever the
run's seed is. Where the newest step is in none of these, the run is rolled back to its newest checkpoint, or to its
beginning. Rollout replicas stay: what they loaded of steps that were undone they give up
(`RolloutDirective.rollbacks`), as the versions will come again with other weights. What they generated since counts as
`rolled-back`, and its prompts, and all that were trained on since, are queued as they were.
"""

from __future__ import annotations

from typing import Final

import attrs

from cosmos_core.control.machine import changes, evaluation, history, membership, progress, publication, relays
from cosmos_core.control.machine.events import Resumed, RolledBack
from cosmos_core.control.machine.ledger import Ledger
from cosmos_core.control.machine.records import EvaluationRecord, SettingChange, StepRecord
from cosmos_core.control.machine.settings import Settings
from cosmos_core.control.machine.state import Checkpoints, Replica, State, StepMark
from cosmos_core.errors import JournalError
from cosmos_core.transport.codec import Codec

MAX_ROLLBACKS: Final = 10
"""Times in a row that a run may be taken back to one step: whatever ends its policy replicas would do so for ever."""
_LEASES: Final = 1 << 40
_TERMS: Final = 1 << 20
"""More leases, and more terms and generations, than can have been used since a snapshot was made."""


def since_recovery(number: int) -> int:
    """The number of a term or a generation as people count them: from the beginning of the run, or its recovery.

    Source: `restored`, which leaves a gap that only logs and messages need.
    """
    return number % _TERMS


@attrs.frozen(kw_only=True)
class RecoverySnapshot:
    """The state of a run at a step of which a checkpoint was wanted, without anything that was in flight.

    Attributes:
        term: Starts of the controller up to then.
        generation_number: Of the newest generation up to then.
        next_lease: The first lease that had not been used.
        changes: Of dynamic keys that hold at the next step.
    """

    settings: Settings
    step: int
    term: int
    generation_number: int
    next_lease: int
    mark: StepMark
    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    changes: tuple[SettingChange, ...] = ()


RECOVERY_SNAPSHOT: Final = Codec((RecoverySnapshot,))


def snapshot_of(state: State, step: int) -> RecoverySnapshot:
    """The snapshot at a step of which a checkpoint was wanted."""
    return RecoverySnapshot(
        settings=state.settings,
        step=step,
        term=state.term,
        generation_number=state.generation_number,
        next_lease=state.next_lease,
        mark=state.marks[step],
        steps=tuple(record for record in state.steps if record.step <= step),
        evaluations=tuple(done for done in state.evaluations if done.version <= step),
        changes=tuple(change for change in state.changes if change.step <= step + 1),
    )


def is_known(snapshot: RecoverySnapshot, state: State) -> bool:
    """True if a state's history has what a snapshot is of: it came to that, or was taken back from it.

    If not, the snapshot was written after all that the history has, which has lost its end.
    """
    newest = state.undone if snapshot.step > state.step else state.generation_number
    return snapshot.generation_number <= newest


def restored(snapshot: RecoverySnapshot, checkpoint: str) -> State:
    """The state that a snapshot and its checkpoint go on from; all that was said under the old journal is older."""
    return State(
        settings=snapshot.settings,
        term=snapshot.term + _TERMS,
        step=snapshot.step,
        generation_number=snapshot.generation_number + _TERMS,
        next_lease=snapshot.next_lease + _LEASES,
        ledgers=[Ledger.restore(mark) for mark in snapshot.mark.ledgers],
        steps=list(snapshot.steps),
        evaluations=list(snapshot.evaluations),
        changes=list(snapshot.changes),
        checkpoints=Checkpoints(saved={snapshot.step: checkpoint}),
        marks={snapshot.step: snapshot.mark},
        undone=snapshot.generation_number + _TERMS,
    )


def is_headless(state: State) -> bool:
    """True if nobody has the newest weights any more, so that the run must be taken back."""
    if state.outcome or not state.has_started or state.step == 0 or state.step in state.checkpoints.saved:
        return False
    return not any(policy.step >= state.step for policy in state.named("policy") if not policy.is_leaving)


def newest_kept(state: State) -> int:
    """The newest step of which there is a checkpoint; 0 if there is none."""
    return max(state.checkpoints.saved, default=0)


def roll_back(state: State, event: RolledBack) -> None:
    """Undo the steps after one that is kept."""
    mark = state.marks.get(event.step)
    if mark is None:
        raise JournalError(f"the run was taken back to step {event.step}, of which the journal has no snapshot")
    if state.rollbacks[-MAX_ROLLBACKS:] == [event.step] * MAX_ROLLBACKS:
        state.fail(
            f"the policy replicas were lost {MAX_ROLLBACKS + 1} times before a checkpoint after step {event.step}; see "
            "their logs, or set policy.checkpoint.interval lower"
        )
        return
    state.rollbacks.append(event.step)
    state.status_details["rolled-back"] = f"from step {state.step} to step {event.step}: all policy replicas were lost"
    _undo_training(state, event.step)
    for policy in state.named("policy"):
        if policy.step > event.step:
            membership.lose(
                state, policy, f"the run was taken back to step {event.step}, and it holds a later one's weights"
            )
    state.ledgers = [ledger.rolled_back(then) for ledger, then in zip(state.ledgers, mark.ledgers, strict=True)]
    for replica in state.named("rollout"):
        _undo_generation(state, replica, event.step)
        state.spare.add(replica.name)
    _undo_publication(state, event.step)
    _undo_changes(state, event.step)
    changes.settle(state)
    state.publish = publication.due_at_start(state)
    evaluation.schedule(state)
    relays.arrange(state)
    state.touch()


def resume(state: State, event: Resumed) -> None:
    """Go back to just after a step: its weights are in a checkpoint, whatever came later did not happen.

    Evaluations of weights up to that step stay, because those weights did not change; what scores them may have.
    """
    mark = state.marks.get(event.step)
    if mark is None:
        raise JournalError(
            f"cannot resume from step {event.step}: the journal knows checkpoints of {sorted(state.marks)} only; "
            "choose one of these"
        )
    for replica in state.replicas.values():
        state.fenced[replica.incarnation] = f"{replica.name}: the run was resumed without it"
    evaluation.tell_left_behind(state, event.step)
    kept = changes.keep(state.changes, event.step, state.settings, event.settings)
    changes.tell_undone(state, kept, event.step)
    fresh = State(
        settings=event.settings,
        term=state.term,
        commands=state.commands,
        step=event.step,
        fenced=state.fenced,
        generation_number=state.generation_number,
        ledgers=[Ledger.restore(then) for then in mark.ledgers],
        next_lease=state.next_lease,
        steps=[record for record in state.steps if record.step <= event.step],
        evaluations=_kept_evaluations(state, event),
        checkpoints=Checkpoints(
            saved={step: path for step, path in state.checkpoints.saved.items() if step <= event.step},
            failed={step: why for step, why in state.checkpoints.failed.items() if step < event.step},
            removed=state.checkpoints.removed,
        ),
        marks={step: mark for step, mark in state.marks.items() if step <= event.step},
        undone=state.generation_number,
        changes=kept,
        status_details=state.status_details,
        troubles=state.troubles,
    )
    for name in State.__slots__:
        if name != "__weakref__":
            setattr(state, name, getattr(fresh, name))
    progress.begin(state)


def _kept_evaluations(state: State, event: Resumed) -> list[EvaluationRecord]:
    before, step = state.settings.scoring, event.step + 1
    changed = {key for key, _ in before.items() ^ event.settings.scoring.items()} if before else ()
    kept = [done for done in state.evaluations if done.version <= event.step]
    for index, done in enumerate(kept):
        if done.is_of_rollouts:
            known = {key: min(first, step) for key, first in done.outdated.items()}
            kept[index] = attrs.evolve(done, outdated=known | dict.fromkeys(sorted(changed), step))
    return kept


def _undo_training(state: State, step: int) -> None:
    evaluation.tell_left_behind(state, step)
    state.step = step
    state.running = state.generation = None
    state.undone = state.generation_number
    state.is_regrouping = False
    state.attempts = state.num_regroups = state.num_useless = 0
    state.pending.clear()
    history.undo(state.steps, step)
    state.evaluations = [done for done in state.evaluations if done.version <= step]
    checkpoints = state.checkpoints
    checkpoints.ordered = -1
    checkpoints.failed = {failed: why for failed, why in checkpoints.failed.items() if failed < step}
    state.marks = {marked: mark for marked, mark in state.marks.items() if marked <= step}


def _undo_changes(state: State, step: int) -> None:
    kept = changes.keep(state.changes, step, state.settings, state.settings)
    changes.tell_undone(state, kept, step)
    state.changes = kept


def _undo_generation(state: State, replica: Replica, step: int) -> None:
    replica.leases.clear()
    replica.num_training = 0
    replica.held.clear()
    replica.kept = {version: endpoint for version, endpoint in replica.kept.items() if version <= step}
    if replica.version > step:
        state.hold(replica, -1)


def _undo_publication(state: State, step: int) -> None:
    """Restore published versions up to the step, though nobody may have them but rollout replicas."""
    newest = max(state.holders, default=-1)
    state.targets = sorted({target for target in state.targets if target <= step} | ({newest} - {-1}))
    state.published = {version: known for version, known in state.published.items() if version <= step}
