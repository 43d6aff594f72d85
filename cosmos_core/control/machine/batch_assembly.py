"""Batches finished groups into training steps: drops what is too old, orders the step, and shares it among members."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Final

import attrs

from cosmos_core.control.machine import changes, evaluation
from cosmos_core.control.machine.state import Replica, RunningStep, State
from cosmos_core.transport.directives import GroupRef, Lease, TrainOrder
from cosmos_core.transport.reports import GroupFailed, GroupFinished, StepFailed

MAX_ATTEMPTS: Final = 20
LEAST_USELESS: Final = 64
"""A run fails after so many prompts in a row of which nothing could be used, and at least eight steps' worth."""
_TIMELY_STEPS: Final = 8
_MAX_PENDING: Final = 2
"""Demonstrations do not wait for rollouts; this bounds the snapshots that wait for their evaluation."""


def on_finished(state: State, replica: Replica, lease: Lease, report: GroupFinished) -> None:
    """A group is complete: keep it for training, or drop it with a reason."""
    # Details are for people; orders need none.
    samples = tuple(attrs.evolve(sample, detail="") if sample.detail else sample for sample in report.samples)
    for sample in report.samples:
        if sample.detail and not sample.is_scored:
            state.status_details[sample.status] = sample.detail
    group = GroupRef(
        position=lease.position,
        row=lease.row,
        lease=lease.lease,
        holder=replica.name,
        endpoint=replica.endpoints.get("payloads", ""),
        samples=samples,
        settings=lease.settings,
    )
    state.ledger.finish(group)
    replica.held.add(lease.lease)
    num_scored = sum(sample.is_scored for sample in samples)
    reason = report.drop
    if not reason and num_scored < max(1, state.stage.min_group_size):
        reason = "unscored"
    if not reason and is_stale(state, group):
        reason = "stale"
    if reason:
        _drop(state, group.position, reason)
    if reason == "unscored":
        _count_useless(state, reason)
    else:
        state.num_useless = 0


def on_failed(state: State, lease: Lease, report: GroupFailed) -> None:
    """A prompt can never be completed."""
    state.explain(report.reason, report.detail)
    state.ledger.drop(lease.position, report.reason)
    _count_useless(state, report.reason)


def _count_useless(state: State, reason: str) -> None:
    """Without this, a run whose every prompt is unusable would go through the dataset for ever."""
    state.num_useless += 1
    if state.num_useless >= max(LEAST_USELESS, 8 * state.stage.prompts_per_step):
        details = "; ".join(f"{kind}: {detail}" for kind, detail in sorted(state.status_details.items()))
        state.fail(f"{state.num_useless} prompts in a row were dropped, the last as {reason!r} ({details})")


def is_stale(state: State, group: GroupRef) -> bool:
    """True if a group's oldest weights lag those of the next step by more than the bound."""
    return state.step - group.oldest_version > state.settings.sync_max_staleness


def drop_stale(state: State) -> None:
    """Drop what the newest step made too old."""
    for group in [group for group in state.ledger.finished.values() if is_stale(state, group)]:
        _drop(state, group.position, "stale")


def form(state: State) -> None:
    """Claim the next step's batch if it is there and the gradient group can train it."""
    generation = state.generation
    if state.running is not None or generation is None or not generation.is_ready:
        return
    if state.is_stopping or state.is_trained:
        return
    size = state.stage.prompts_per_step
    if not state.stage.uses_rollouts:
        if len(state.pending) > _MAX_PENDING:
            return
        _read(state, size)
    ledger = state.ledger
    if len(ledger.finished) < size:
        return
    # Those that will be stale first: the order of positions would let them wait for what came back to the queue.
    finished = sorted(ledger.finished.values(), key=lambda group: (group.oldest_version, group.position))
    if state.settings.waits_for_oldest and state.stage.uses_rollouts and _must_wait(state, finished, size):
        return
    positions = sorted(group.position for group in finished[:size])
    ledger.batch(positions)
    _order(state, [ledger.batched[position] for position in positions])


def _must_wait(state: State, finished: Sequence[GroupRef], size: int) -> bool:
    """True if a step of the oldest finished groups would take places that groups in flight need to be trained in time.

    Groups of a version, and of older ones, fit into the later steps that may train them, or this step waits for one of
    those in flight. Leases are granted such that all fit, so nothing becomes stale because it is slow.
    """
    left = Counter([*state.ledger.in_flight.values(), *(group.oldest_version for group in finished[size:])])
    # Whatever is older is stale already, as the bound was lowered, and not waited for.
    oldest, newest = state.step - state.settings.sync_max_staleness, finished[size - 1].oldest_version
    num_left = 0
    for version in sorted(version for version in left if oldest <= version < newest):
        num_left += left[version]
        if num_left > (version - oldest) * size:
            return True
    return False


def repeat(state: State) -> None:
    """Order the running step once more, shared among the members of the present generation."""
    positions = sorted(state.ledger.batched)
    _order(state, [state.ledger.batched[position] for position in positions])


def on_step_failed(state: State, report: StepFailed) -> bool:
    """Queue again the prompts whose payloads are gone; the others wait for a new batch.

    Returns whether that is all there is to it: if not, the gradient group is broken.
    """
    missing = set(report.missing)
    running = state.running
    order = running.order if running is not None else None
    if order is not None and (order.step, order.attempt) == (report.step, report.attempt):
        state.status_details["step"] = f"step {report.step}, attempt {report.attempt}: {report.reason}"
        if not missing.intersection(group.lease for group in order.groups):
            return False
        for group in list(state.ledger.batched.values()):
            state.ledger.release(group.position)
            holder = state.replicas.get(group.holder)
            if group.holder and (holder is None or group.lease not in holder.held):
                missing.add(group.lease)
        state.running = None
        state.touch("policy")
    for group in [group for group in state.ledger.finished.values() if group.lease in missing]:
        state.let_go(state.ledger.requeue(group.position))
    return True


def balanced(weights: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Split indices so that the shares' sums are even: the heaviest first, each to the lightest share.

    Deterministic: ties go to the lower index. Each share is ascending.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    # Counting members second gives every share one before any has two of weight 0.
    heap = [(0, 0, share) for share in range(num_shares)]
    for index in sorted(range(len(weights)), key=lambda index: (-weights[index], index)):
        total, count, share = heap[0]
        shares[share].append(index)
        heapq.heapreplace(heap, (total + weights[index], count + 1, share))
    return tuple(tuple(sorted(share)) for share in shares)


def admit_more(state: State) -> None:
    """Hold fewer prompts back once none was dropped as stale for some steps."""
    state.num_timely += 1
    if state.num_timely >= _TIMELY_STEPS:
        state.held_back //= 2
        state.num_timely = 0


def _drop(state: State, position: int, reason: str) -> None:
    state.let_go(state.ledger.drop(position, reason))
    if reason == "stale":
        state.held_back = min(state.held_back + 1, state.settings.sync_max_staleness * state.stage.prompts_per_step)
        state.num_timely = 0


def _read(state: State, size: int) -> None:
    """Demonstrations need no making: the next positions of the stream are finished."""
    settings, ledger = state.settings, state.ledger
    while len(ledger.finished) < size:
        position = ledger.next()
        row = settings.row_of(position, state.stage_index)
        ledger.finished[position] = GroupRef(position=position, row=row)


def _order(state: State, groups: Sequence[GroupRef]) -> None:
    generation = state.generation
    assert generation is not None
    state.attempts += 1
    if state.attempts > MAX_ATTEMPTS:
        why = state.status_details.get("step", "its gradient group broke each time")
        state.fail(f"step {state.step + 1} was tried {MAX_ATTEMPTS} times without success; last: {why}")
        return
    weights = [group.num_units for group in groups]
    order = TrainOrder(
        step=state.step + 1,
        attempt=state.attempts,
        stage=state.stage_index,
        groups=tuple(groups),
        shares=balanced(weights, len(generation.order.members)),
        publish=state.settings.publishes(state.step + 1),
        measures=evaluation.unmeasured(state, state.step + 1),
        settings=changes.values_at(state, state.step + 1),
    )
    state.running = RunningStep(order=order, generation=generation.order.generation)
    state.touch("policy")
