"""A step's end, and what is due at a step's boundary: records, checkpoints, the end of the run, resuming."""

from __future__ import annotations

from collections import Counter
from typing import Final

from cosmos_core.config.checks import superseded
from cosmos_core.control.machine import batch_assembly, changes, evaluation, history, publication, turns
from cosmos_core.control.machine.records import StepRecord, merits
from cosmos_core.control.machine.state import Replica, RunningStep, State
from cosmos_core.transport.directives import GroupRef
from cosmos_core.transport.reports import CheckpointFailed, CheckpointSaved, StepDone
from cosmos_core.types import SampleStatus

MOST_MARKS: Final = 1000
"""Checkpoints, besides the best one, from which a run can be resumed: the newest ones that were wanted."""


def on_step_done(state: State, replica: Replica, report: StepDone) -> bool:
    """A member applied a step; whether with it all members of the present generation have."""
    if report.generation <= state.undone:
        return False
    replica.step = report.step
    running, generation = state.running, state.generation
    if running is None:
        return False
    order = running.order
    if (report.step, report.attempt, report.generation) != (order.step, order.attempt, running.generation):
        return False
    running.done.add(replica.name)
    running.skipped = running.skipped or report.skipped
    running.metrics = running.metrics or report.metrics
    running.dropped.update(report.dropped)
    running.details.update(report.details)
    known = {measured.version for measured in running.heldout}
    # One whose group broke after the step may lack what another has.
    running.heldout += tuple(measured for measured in report.heldout if measured.version not in known)
    if generation is None or generation.order.generation != running.generation:
        return False
    return running.done.issuperset(generation.order.members)


def finish_step(state: State) -> None:
    """The running step is applied wherever it has to be: account for its batch, and see what is due."""
    running, ledger, stage = state.running, state.ledger, state.stage_index
    assert running is not None
    for position in sorted(running.dropped.keys() & ledger.batched.keys()):
        state.let_go(ledger.drop(position, running.dropped[position]))
    for reason, detail in running.details.items():
        state.explain(reason, detail)
    groups = [ledger.consume(position) for position in sorted(ledger.batched)]
    for group in groups:
        state.let_go(group)
    record = _record(state, running, groups, stage)
    history.add(state.steps, record)
    state.awaited_s = 0.0
    ledger.totals.add(record)
    _forget_mark(state)
    state.step = running.order.step
    state.running = None
    state.attempts = 0
    if running.order.publish:
        state.publish = state.step
    batch_assembly.admit_more(state)
    batch_assembly.drop_stale(state)
    evaluation.schedule(state)
    evaluation.record_losses(state, running)
    if state.settings.saves(state.step):
        state.checkpoints.ordered = state.step
    enter_step(state)
    turns.trust(state)
    state.mark(running.generation)
    state.touch()


def enter_step(state: State) -> None:
    """Go by the dynamic keys of the next step, which has not been ordered."""
    if changes.settle(state):
        batch_assembly.drop_stale(state)


def close(state: State) -> None:
    """Bring a run that is stopping, or trained, to its end: last evaluation, last checkpoint."""
    saved = state.checkpoints
    if state.is_stopping:
        if not state.has_started:
            _end(state)
            return
        if state.running is not None:
            return
    elif not state.is_trained or state.pending:
        return
    if state.step in saved.saved:
        _end(state)
    elif state.step in saved.failed:
        state.fail(f"the last checkpoint, of step {state.step}, was not saved: {saved.failed[state.step]}")
    elif saved.ordered != state.step:
        saved.ordered = state.step
        state.touch("policy")


def _end(state: State) -> None:
    if state.is_stopping:
        evaluation.tell_cut_off(state)
    state.conclude("stopped" if state.is_stopping else "finished")


def on_saved(state: State, report: CheckpointSaved) -> None:
    """A checkpoint is complete; who saved it removes old ones."""
    if not _is_of_run(state, report):
        return
    checkpoints, best, keep = state.checkpoints, best_checkpoint(state), state.settings.policy_checkpoint_keep
    checkpoints.saved[report.step] = report.path
    checkpoints.failed.pop(report.step, None)
    checkpoints.removed.discard(report.step)
    checkpoints.removed.update(superseded(checkpoints.kept, keep, best))
    _settle_checkpoint(state, report.step)


def on_not_saved(state: State, report: CheckpointFailed) -> None:
    """A checkpoint could not be made; the run goes on without it unless it was the last one."""
    if not _is_of_run(state, report):
        return
    if report.step not in state.checkpoints.saved:
        state.checkpoints.failed[report.step] = report.reason
        state.status_details["checkpoint"] = f"step {report.step}: {report.reason}"
    _settle_checkpoint(state, report.step)


def best_checkpoint(state: State) -> int | None:
    """The saved step with the best evaluation, the latest of equals; None if none of them was evaluated.

    Scores of rollouts count where there are some, else losses, unless preferences are learnt: the loss of the preferred
    completions may well rise meanwhile. One that scored nothing measured nothing, and what other rewards than those of
    now scored does not compare.
    """
    saved = [done for done in state.evaluations if done.version in state.checkpoints.saved and not done.outdated]
    measured = [done for done in saved if done.loss is not None]
    by_loss = [] if state.settings.main.source == "preferences" else measured
    evaluated = [done for done in saved if done.score is not None] or by_loss
    known = merits(evaluated)
    best = max(evaluated, key=lambda done: (known[done.version], done.version), default=None)
    return best.version if best is not None else None


def begin(state: State) -> None:
    """Set up all that is due before the first step of a new or resumed run."""
    changes.settle(state)
    state.publish = publication.due_at_start(state)
    evaluation.schedule(state)
    evaluation.tell_unmeasurable(state)


def _is_of_run(state: State, report: CheckpointSaved | CheckpointFailed) -> bool:
    """True if a checkpoint is of what the run has come to, and not of the same step before it was undone."""
    mark = state.marks.get(report.step)
    return mark is not None and (report.generation < 0 or report.generation >= mark.generation)


def _settle_checkpoint(state: State, step: int) -> None:
    if state.checkpoints.ordered == step:
        state.checkpoints.ordered = -1
        state.touch("policy")


def _forget_mark(state: State) -> None:
    """Nobody resumes from a step of which no checkpoint was wanted, nor from one of long ago."""
    checkpoints = state.checkpoints
    wanted = (0, checkpoints.ordered, *checkpoints.saved, *checkpoints.failed)
    if state.step not in wanted:
        state.marks.pop(state.step, None)
    if len(state.marks) > MOST_MARKS:
        oldest = min(state.marks.keys() - {0, best_checkpoint(state)})
        for kept in (state.marks, checkpoints.saved, checkpoints.failed):
            kept.pop(oldest, None)


def _record(state: State, running: RunningStep, groups: list[GroupRef], stage: int) -> StepRecord:
    samples = [sample for group in groups for sample in group.samples]
    scored = [sample for sample in samples if sample.is_scored]
    rewards: dict[str, list[float]] = {}
    failed: dict[str, int] = {}
    for sample in samples:
        if not sample.is_scored:
            failed[sample.status] = failed.get(sample.status, 0) + 1
            continue
        for name, value in sample.rewards.items():
            rewards.setdefault(name, []).append(value)
    ages = [state.step - sample.oldest_version for sample in scored]
    truncated = sum(sample.status == SampleStatus.TRUNCATED for sample in scored)
    given = [[sample.reward or 0.0 for sample in group.samples if sample.is_scored] for group in groups]
    return StepRecord(
        step=running.order.step,
        stage=stage,
        attempt=running.order.attempt,
        skipped=running.skipped,
        num_groups=len(groups),
        num_samples=len(scored) if samples else len(groups),
        num_units=sum(sample.num_units for sample in scored),
        reward=sum(sample.reward or 0.0 for sample in scored) / len(scored) if scored else None,
        rewards={name: sum(values) / len(values) for name, values in rewards.items()},
        truncated=truncated / len(scored) if scored else 0.0,
        failed=failed,
        staleness_mean=sum(ages) / len(ages) if ages else 0.0,
        staleness_max=max(ages, default=0),
        metrics=running.metrics,
        dropped=dict(state.ledger.dropped),
        ages=dict(sorted(Counter(ages).items())),
        settings=running.order.settings,
        drawn=changes.drawn(group.settings for group in groups),
        generation=running.generation,
        equal=dict(Counter(each[0] for each in given if len(each) > 1 and len(set(each)) == 1)),
        awaited_s=state.awaited_s / max(1, len(state.members["rollout"])),
    )
