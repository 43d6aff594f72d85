"""The pure state machine: `step(state, event)` without I/O, clock or randomness.

Any history can be replayed: the same events give the same state. What replicas shall do is derived from the state
(`directives`), so no event produces commands that could be lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from cosmos_core.control.machine import (
    batch_assembly,
    changes,
    dispatch,
    evaluation,
    membership,
    profiles,
    progress,
    publication,
    recovery,
    turns,
)
from cosmos_core.control.machine.events import (
    Commanded,
    ControllerStarted,
    Event,
    GroupStalled,
    JoinTimedOut,
    Recovered,
    RegroupDue,
    ReplicaJoined,
    ReplicaLost,
    Reported,
    Resumed,
    RolledBack,
    RunEnded,
    RunOpened,
)
from cosmos_core.control.machine.recovery import RECOVERY_SNAPSHOT, restored
from cosmos_core.control.machine.state import Replica, State, opened
from cosmos_core.errors import ConfigError, JournalError, TransportError
from cosmos_core.transport.messages import REQUEST, Drain, Lost, Profile, Request, Set, Stop
from cosmos_core.transport.reports import (
    REPORT,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    GenerationFailed,
    GenerationFormed,
    GroupFailed,
    GroupFinished,
    Left,
    Profiled,
    Report,
    Slept,
    StepDone,
    StepFailed,
    Troubled,
    WeightsLoaded,
    WeightsPublished,
    WeightsRejected,
)


def fold(events: Iterable[Event], state: State | None = None) -> State:
    """The state that a history leads to, from its beginning or from `state`, which is changed in place."""
    for event in events:
        if isinstance(event, RunOpened | Recovered):
            state = begin(event)
        elif state is None:
            raise JournalError(f"the journal begins with {type(event).__name__}, not RunOpened: it is another file")
        else:
            step(state, event)
    if state is None:
        raise JournalError("the journal is empty: the run has not been opened")
    return state


def begin(event: RunOpened | Recovered) -> State:
    """The state of a run that was just opened, or recovered."""
    if isinstance(event, RunOpened):
        state = opened(event.settings)
    else:
        try:
            snapshot = RECOVERY_SNAPSHOT.decode(event.snapshot)
        except TransportError as error:
            raise JournalError(f"the run was recovered by another release of cosmos-core; use it ({error})") from error
        state = restored(snapshot, event.checkpoint)
        evaluation.tell_forgotten(state)
    progress.begin(state)
    return state


def step(state: State, event: Event) -> None:
    """Take one event in. An event that is fenced, repeated or out of date changes nothing.

    Neither does one that is refused: by a TransportError a report that is none, by a JournalError a way back to a step
    that the journal does not know.
    """
    match event:
        case Reported():
            _report(state, event)
        case ReplicaJoined():
            membership.join(state, event)
        case ReplicaLost():
            _lost(state, event)
        case Commanded():
            _take_command(state, event)
        case RegroupDue() | GroupStalled() | JoinTimedOut():
            membership.on_time(state, event)
        case ControllerStarted():
            state.term = event.term
        case Resumed():
            recovery.resume(state, event)
        case RolledBack():
            recovery.roll_back(state, event)
        case RunEnded():
            state.has_ended = True
        case _:
            raise JournalError(f"event {event!r} cannot come here")
    _advance(state)


def _advance(state: State) -> None:
    """Do what has become possible."""
    if state.outcome:
        return
    membership.regroup(state)
    if state.is_stopping or state.is_trained:
        progress.close(state)
    batch_assembly.form(state)
    publication.retarget(state)
    turns.take(state)
    dispatch.dispatch(state)
    membership.release(state)


def _report(state: State, event: Reported) -> None:
    replica = state.replicas.get(event.name)
    if replica is None or replica.incarnation != event.incarnation or event.sequence != replica.received + 1:
        return
    report = REPORT.decode(event.report)
    replica.received = event.sequence
    if isinstance(report, Left):
        membership.leave(state, replica)
    elif isinstance(report, Failed):
        state.fail(f"{replica.name}: {report.reason}")
    elif isinstance(report, Slept):
        turns.on_slept(state, replica, report)
    elif isinstance(report, Profiled):
        profiles.on_profiled(state, replica, report)
    elif isinstance(report, Troubled):
        state.count(report)
    elif replica.role == "rollout":
        _rollout_report(state, replica, report)
    else:
        _policy_report(state, replica, report)


def _lost(state: State, event: ReplicaLost) -> None:
    replica = state.replicas.get(event.name)
    if replica is not None and replica.incarnation == event.incarnation:
        membership.lose(state, replica, event.reason)


def _rollout_report(state: State, replica: Replica, report: Report) -> None:
    match report:
        case GroupFinished() | GroupFailed():
            _settle_lease(state, replica, report)
        case WeightsLoaded():
            publication.on_loaded(state, replica, report)
        case WeightsRejected():
            publication.on_rejected(state, replica, report)
        case _:
            state.fail(f"{replica.name}, a rollout replica, reported {type(report).__name__}")


def _policy_report(state: State, replica: Replica, report: Report) -> None:
    match report:
        case StepDone():
            if progress.on_step_done(state, replica, report):
                progress.finish_step(state)
        case StepFailed() | GenerationFailed():
            if isinstance(report, GenerationFailed) or not batch_assembly.on_step_failed(state, report):
                membership.on_broken(state, report)
        case GenerationFormed():
            if membership.on_formed(state, replica, report):
                progress.finish_step(state)
        case WeightsPublished():
            publication.on_published(state, replica, report)
        case CheckpointSaved():
            progress.on_saved(state, report)
        case CheckpointFailed():
            progress.on_not_saved(state, report)
        case _:
            state.fail(f"{replica.name}, a policy replica, reported {type(report).__name__}")


def _settle_lease(state: State, replica: Replica, report: GroupFinished | GroupFailed) -> None:
    lease = replica.leases.pop(report.lease, None)
    if lease is None:
        return
    state.awaited_s += report.awaited_s if isinstance(report, GroupFinished) else 0.0
    state.touched.add(replica.name)
    state.spare.add(replica.name)
    if lease.purpose == "evaluation":
        evaluation.settle(state, lease, report)
        return
    replica.num_training -= 1
    if isinstance(report, GroupFinished):
        batch_assembly.on_finished(state, replica, lease, report)
    else:
        batch_assembly.on_failed(state, lease, report)


def refusal(state: State, request: Request) -> str:
    """Say why the run cannot do what is asked; empty if it can."""
    if state.outcome and not isinstance(request, Stop):
        return f"the run is over ({state.outcome})"
    match request:
        case Stop() | Lost():
            return ""
        case Drain():
            return membership.refusal(state, request.name)
        case Profile():
            return profiles.refusal(state, request)
        case Set():
            try:
                return changes.refusal(state, changes.asked_of(state, request))
            except ConfigError as error:
                return str(error)


def _take_command(state: State, event: Commanded) -> None:
    """Do what was asked; once, however often it was."""
    request = REQUEST.decode(event.request)
    if event.ident in state.commands:
        return
    state.commands.add(event.ident)
    match request:
        case Stop():
            state.is_stopping = True
            state.touch()
        case Drain():
            membership.drain(state, request.name)
        case Profile():
            profiles.take(state, event.ident, request)
        case Set():
            changes.take(state, request)
            if not state.attempts:
                progress.enter_step(state)
        case _:
            pass
