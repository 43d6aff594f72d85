"""Evaluations: when one is due, its leases, its results.

Completions are made and scored by rollout replicas, beside training. Where the main stage learns from demonstrations,
policy replicas measure the loss of held-out ones as part of a step. A run may have both, each with records of its own.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.config.job import Unit, are_right_or_wrong
from cosmos_core.control.machine.records import EvaluationRecord, HeldOutCompletion
from cosmos_core.control.machine.state import Evaluation, HeldOutResult, Replica, RunningStep, State
from cosmos_core.transport.directives import Lease
from cosmos_core.transport.reports import GroupFailed, GroupFinished, HeldOutLoss
from cosmos_core.types import SampleStatus

_KEPT_COMPLETIONS: Final = 8
_MOST_SHOWN: Final = 48
"""Evaluations that keep their completions at most."""
_CUT_OFF: Final = "evaluation at the stop"


def schedule(state: State) -> None:
    """Make the evaluation of the newest step pending, if one is due and not done."""
    version = state.step
    if not state.settings.evaluates(version) or any(
        done.version == version and done.is_of_rollouts for done in state.evaluations
    ):
        return
    rows = list(range(state.settings.evaluation_prompts))
    state.pending.append(Evaluation(version=version, queued=rows[::-1]))


def unmeasured(state: State, step: int) -> tuple[int, ...]:
    """Versions whose held-out loss the members of `step` shall measure: its result, and its start if that is lacking.

    That of the start is lacking before the first step, and where a group broke after the step before.
    """
    due = [version for version in (step - 1, step) if state.settings.measures(version)]
    known = {done.version for done in state.evaluations if done.loss is not None} if due else ()
    return tuple(version for version in due if version not in known)


def record_losses(state: State, running: RunningStep) -> None:
    """Take in what the members of a step that is done have measured; say what they could not."""
    for found in sorted(running.heldout, key=lambda measured: measured.version):
        for row, reason in found.dropped:
            state.explain(f"held-out {reason}", found.details.get(reason, f"row {row}"))
        if found.num_rows:
            _keep(state.evaluations, _loss_record(found))
    measured = {found.version for found in running.heldout if found.num_rows}
    for version in sorted(set(running.order.measures) - measured):
        # What is lacking of the step's own result is asked for again with the next step, if there is one.
        if version < running.order.step or version == state.settings.last_step:
            _tell_unmeasured(state, version)


def tell_unmeasurable(state: State) -> None:
    """Say it if a run goes on after its last step, as one that was made shorter, and lacks a loss: no step is left."""
    if state.is_trained and state.step in unmeasured(state, state.step):
        _tell_unmeasured(state, state.step)


def grant(state: State, replica: Replica) -> None:
    """Lease the next queued row of the first pending evaluation to a replica that has exactly its version."""
    evaluation = state.pending[0]
    row = evaluation.queued.pop()
    lease = Lease(lease=state.next_lease, purpose="evaluation", position=row, row=row, version=evaluation.version)
    state.next_lease += 1
    evaluation.in_flight.add(row)
    replica.leases[lease.lease] = lease
    state.touched.add(replica.name)


def requeue(state: State, lease: Lease) -> None:
    """A held-out row was lost with its replica."""
    for evaluation in state.pending:
        if evaluation.version == lease.version:
            evaluation.in_flight.remove(lease.row)
            evaluation.queued.append(lease.row)


def settle(state: State, lease: Lease, report: GroupFinished | GroupFailed) -> None:
    """A held-out row has its completion, or can have none, and counts as unscored."""
    result = HeldOutResult()
    if isinstance(report, GroupFinished) and report.samples:
        result = _result(state, lease, report)
    evaluation = next((due for due in state.pending if due.version == lease.version), None)
    if evaluation is None or lease.row not in evaluation.in_flight:
        return
    evaluation.in_flight.remove(lease.row)
    evaluation.results[lease.row] = result
    if len(evaluation.results) == state.settings.evaluation_prompts:
        state.pending.remove(evaluation)
        _keep(state.evaluations, _record(evaluation, state.settings.unit))


def abandon(state: State) -> None:
    """Give up evaluations of weights that no replica has any more."""
    for evaluation in list(state.pending):
        known = state.published.get(evaluation.version)
        is_lost = evaluation.version < state.step and known is not None and not known.sources
        if is_lost and evaluation.version not in state.holders:
            state.pending.remove(evaluation)
            _tell_lost(state, [evaluation])
            for replica in state.named("rollout"):
                for lease in [each for each in replica.leases.values() if each.version == evaluation.version]:
                    # Of one that slept: those that have other weights have none.
                    del replica.leases[lease.lease]
                    state.spare.add(replica.name)
                    state.touched.add(replica.name)


def tell_cut_off(state: State) -> None:
    """Say which evaluations a run that was stopped has not done."""
    if state.pending:
        told = [
            f"version {due.version} ({len(due.results)} of {state.settings.evaluation_prompts} prompts done, "
            + ("and a run that goes on begins again)" if due.version == state.step else "and its weights are gone)")
            for due in state.pending
        ]
        state.status_details[_CUT_OFF] = f"the stop cut off that of {', and of '.join(told)}"


def tell_left_behind(state: State, step: int) -> None:
    """Say which evaluations a run that is resumed from a step cannot finish: nobody has weights from before it."""
    state.status_details.pop(_CUT_OFF, None)
    _tell_lost(state, [due for due in state.pending if due.version < step])


def tell_forgotten(state: State) -> None:
    """Say which evaluations a run that goes on from a snapshot knows nothing of: those under way are not in it."""
    known = {done.version for done in state.evaluations if done.is_of_rollouts}
    lacking = [each for each in range(state.step) if state.settings.evaluates(each) and each not in known]
    if lacking:
        told = ", ".join(map(str, lacking))
        state.status_details["evaluation"] = f"of version {told} none is on record, and its weights are gone"


def _tell_lost(state: State, evaluations: Sequence[Evaluation]) -> None:
    if evaluations:
        told = (f"version {each.version} was lost before its evaluation was done" for each in evaluations)
        state.status_details["evaluation"] = "; ".join(told)


def _tell_unmeasured(state: State, version: int) -> None:
    state.status_details["evaluation"] = f"the held-out loss at step {version} was not measured"


def _result(state: State, lease: Lease, report: GroupFinished) -> HeldOutResult:
    sample = report.samples[0]
    pinned = sample.oldest_version == sample.newest_version == lease.version
    first = state.settings.rewards[0]
    if not (counts := pinned and sample.is_scored):
        state.status_details[sample.status if pinned else "evaluation"] = sample.detail or "not the pinned version"
    completion = None
    if lease.row < _KEPT_COMPLETIONS:
        completion = HeldOutCompletion(
            row=lease.row, text=report.text, reward=sample.reward, detail=sample.detail, media=report.media
        )
    return HeldOutResult(
        score=sample.rewards.get(first, sample.reward) if counts else None,
        reward=sample.reward if counts else None,
        is_truncated=sample.status == SampleStatus.TRUNCATED,
        completion=completion,
    )


def _keep(evaluations: list[EvaluationRecord], done: EvaluationRecord) -> None:
    """Add an evaluation; the first and the newest keep their completions, of many others every second one."""
    evaluations.append(done)
    shown = [index for index, each in enumerate(evaluations) if each.completions]
    if len(shown) > _MOST_SHOWN:
        for index in shown[1:-1:2]:
            evaluations[index] = attrs.evolve(evaluations[index], completions=())


def _loss_record(found: HeldOutLoss) -> EvaluationRecord:
    return EvaluationRecord(
        version=found.version,
        accuracy=None,
        reward=None,
        num_prompts=found.num_rows + len(found.dropped),
        num_unscored=len(found.dropped),
        num_truncated=0,
        completions=(),
        loss=found.loss,
        num_units=found.num_units,
        dropped=dict(Counter(reason for _, reason in found.dropped)),
    )


def _record(evaluation: Evaluation, unit: Unit) -> EvaluationRecord:
    """Rewards may be below 0 throughout, so that one without a score must not count as 0 in their mean."""
    results = [evaluation.results[row] for row in sorted(evaluation.results)]
    scores = [result.score for result in results if result.score is not None]
    rewards = [result.reward for result in results if result.reward is not None]
    return EvaluationRecord(
        version=evaluation.version,
        accuracy=sum(scores) / len(results) if scores and are_right_or_wrong(scores, unit) else None,
        reward=sum(rewards) / len(rewards) if rewards else None,
        spread=statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        num_prompts=len(results),
        num_unscored=len(results) - len(scores),
        num_truncated=sum(result.is_truncated for result in results),
        completions=tuple(result.completion for result in results if result.completion is not None),
    )
