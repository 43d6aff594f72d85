"""Leases: which rollout replica works on which prompt."""

from __future__ import annotations

import heapq

from cosmos_core.control.machine import changes, evaluation, turns
from cosmos_core.control.machine.state import Replica, State
from cosmos_core.transport.directives import Lease


def dispatch(state: State) -> None:
    """Lease what may be leased now: held-out rows first, then prompts."""
    if not state.has_rollouts or state.is_stopping or not turns.may_wake(state, "rollout"):
        return
    if state.pending and state.pending[0].queued:
        _evaluate(state)
    if state.is_trained or not state.stage.uses_rollouts:
        return
    if state.settings.synchronous:
        _wave(state)
    else:
        _stream(state)


def lost_with(state: State, replica: Replica) -> None:
    """Queue again all that a lost rollout replica had in flight, or held and nobody had batched."""
    ledger = state.ledger
    for lease in replica.leases.values():
        if lease.purpose == "evaluation":
            evaluation.requeue(state, lease)
        else:
            ledger.requeue(lease.position)
    for group in [group for group in ledger.finished.values() if group.holder == replica.name]:
        ledger.requeue(group.position)


def load(state: State, replica: Replica) -> int:
    """Sequences that a replica has in flight."""
    held_out = len(replica.leases) - replica.num_training
    return held_out + replica.num_training * state.settings.rollout_group_size


def _evaluate(state: State) -> None:
    """Spread held-out rows evenly, up to capacity; all at once where a run must not depend on timing."""
    settings = state.settings
    most = settings.capacity * settings.rollout_group_size
    names = state.holders.get(state.pending[0].version, set()) - state.draining
    ready = [state.replicas[name] for name in names]
    heap = [(len(r.leases) - r.num_training, r.name) for r in ready]
    heapq.heapify(heap)
    while heap and state.pending[0].queued:
        held, name = heap[0]
        if held >= most and not settings.synchronous:
            return
        evaluation.grant(state, state.replicas[name])
        heapq.heapreplace(heap, (held + 1, name))


def _stream(state: State) -> None:
    """Async: keep every replica busy, as far ahead as the staleness bound will allow to be trained.

    The n-th live prompt of the stage is trained at version `first + n // prompts_per_step`: granting it to a replica
    is only of use if its weights will not be too old by then.
    """
    settings, stage, ledger = state.settings, state.stage, state.ledger
    trained = ledger.consumed + ledger.num_live
    if trained >= _limit(state, state.target):
        return
    most = (settings.capacity - 1) * settings.rollout_group_size
    heap: list[tuple[int, str, int]] = []
    for version, names in state.holders.items():
        limit = _limit(state, version)
        if version < stage.first_version or trained >= limit:
            continue
        for name in names & state.spare:
            if (held := load(state, state.replicas[name])) > most:
                state.spare.remove(name)
            elif name not in state.draining:
                heap.append((held, name, limit))
    heapq.heapify(heap)
    while heap:
        held, name, limit = heap[0]
        if held > most:
            return
        if trained >= limit:
            heapq.heappop(heap)
            continue
        _lease(state, state.replicas[name])
        trained += 1
        heapq.heapreplace(heap, (held + settings.rollout_group_size, name, limit))


def _limit(state: State, version: int) -> int:
    """Prompts of the stage that may be live or consumed before another one would be stale for `version`.

    They are fewer where prompts are held back, but never fewer than the next step needs.
    """
    stage = state.stage
    steps = version + state.settings.sync_max_staleness + 1 - stage.first_version
    bound = min(steps, stage.steps) * stage.prompts_per_step
    needed = (state.step + 1 - stage.first_version) * stage.prompts_per_step
    return min(bound, max(bound - state.held_back, needed))


def _wave(state: State) -> None:
    """Sync: grant exactly what the next step lacks, once everything is at rest at the newest weights."""
    ledger = state.ledger
    if ledger.in_flight or state.pending or state.running is not None or state.target != state.step:
        return
    behind = (names for version, names in state.holders.items() if version != state.target)
    if any(name not in state.draining for names in behind for name in names):
        return
    replicas = state.staying("rollout")
    missing = state.stage.prompts_per_step - len(ledger.finished)
    for index in range(missing if replicas else 0):
        _lease(state, replicas[index % len(replicas)])


def _lease(state: State, replica: Replica) -> None:
    number = state.next_lease
    state.next_lease += 1
    position = state.ledger.lease(replica.version)
    replica.leases[number] = Lease(
        lease=number,
        purpose="train",
        position=position,
        row=state.settings.row_of(position, state.stage_index),
        version=-1,
        settings=changes.values_at(state, changes.next_step(state)) if state.changes else {},
    )
    replica.num_training += 1
    state.touched.add(replica.name)
