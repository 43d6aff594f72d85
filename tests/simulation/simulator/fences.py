"""What is stale, judged from the outside: the state before, and what was said.

A stale message, or a stale report in a message that is not, must change nothing. This is written apart from the
machine, whose own fences are what it tests.
"""

from __future__ import annotations

from typing import Final

import attrs
import msgspec

from cosmos_core.control.machine.events import ReplicaJoined, Reported
from cosmos_core.control.machine.state import Replica, State
from cosmos_core.transport.messages import REQUEST, WIRE_VERSION, Beat, Command, Hello, Lost, Reports, Up
from cosmos_core.transport.reports import (
    GenerationFailed,
    GenerationFormed,
    GroupFailed,
    GroupFinished,
    Report,
    StepDone,
    StepFailed,
)

Print = dict[str, bytes]

_ENCODE: Final = msgspec.msgpack.Encoder(enc_hook=repr).encode
_FIELDS: Final = tuple(field.name for field in attrs.fields(State) if field.eq and field.name != "replicas")
_OF_REPLICA: Final = tuple(field.name for field in attrs.fields(Replica) if field.eq)


def fingerprint(state: State) -> Print:
    """A state by parts, to name those that differ from another fingerprint of the same object."""
    found = {name: _ENCODE(getattr(state, name)) for name in _FIELDS}
    for replica in state.replicas.values():
        found |= {f"{replica.name}.{name}": _ENCODE(getattr(replica, name)) for name in _OF_REPLICA}
    return found


def changes(before: Print, after: Print) -> set[str]:
    """Parts of a state that differ."""
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def stale_message(state: State, message: Up) -> str:
    """Why a message to the controller must change nothing; empty if it may."""
    match message:
        case Hello():
            present = state.replicas.get(message.name)
            if message.wire != WIRE_VERSION or message.run_id != state.settings.run_id:
                return "of another run or release"
            if message.incarnation in state.fenced:
                return "of an incarnation that was given up"
            return "of one that is in the run" if present and present.incarnation == message.incarnation else ""
        case Beat() | Reports():
            return _stale_sender(state, message)
        case Command():
            return _stale_request(state, message)
        case _:
            return ""


def _stale_request(state: State, command: Command) -> str:
    if command.ident in state.commands:
        return "of a request that was taken in"
    request = REQUEST.decode(command.request)
    present = {replica.incarnation for replica in state.replicas.values()}
    if isinstance(request, Lost) and request.incarnation not in present:
        return f"of the process {request.incarnation}, which is not in the run"
    return ""


def _stale_sender(state: State, message: Beat | Reports) -> str:
    replica = state.replicas.get(message.name)
    if replica is None or replica.incarnation != message.incarnation:
        return "of an incarnation that is not in the run"
    if message.term != state.term:
        return f"of term {message.term}, this is {state.term}"
    if isinstance(message, Beat):
        return ""
    if message.first > replica.received + 1:
        return f"beyond a gap after report {replica.received}"
    return (
        f"of reports up to {replica.received}" if message.first + len(message.reports) - 1 <= replica.received else ""
    )


def stale_event(state: State, event: ReplicaJoined | Reported, report: Report | None, undone: int) -> str:
    """Why an event of the journal must change nothing but what `told` allows; empty if it may.

    Args:
        state: Before the event.
        event: What happened.
        report: What was reported, decoded.
        undone: What generations up to this one came to did not happen.
    """
    replica = state.replicas.get(event.name)
    if isinstance(event, ReplicaJoined):
        return "an incarnation that was given up joined" if event.incarnation in state.fenced else ""
    if replica is None or replica.incarnation != event.incarnation:
        return "a report of an incarnation that is not in the run"
    if event.sequence != replica.received + 1:
        return f"report {event.sequence} after {replica.received}"
    return _stale_report(state, replica, report, undone)


def _stale_report(state: State, replica: Replica, report: Report | None, undone: int) -> str:
    match report:
        case GroupFinished() | GroupFailed() if report.lease not in replica.leases:
            return f"lease {report.lease} is not the replica's"
        case StepDone() | GenerationFormed() if report.generation <= undone:
            return f"the run was taken back, and generation {report.generation} is older"
        case StepDone() | StepFailed():
            return _stale_step(state, report)
        case GenerationFormed() if state.generation is None:
            return ""  # that it has the newest weights after all lets the next generation be ordered
        case GenerationFormed() | GenerationFailed():
            present = state.generation
            number = present.order.generation if present else None
            return f"generation {report.generation}, present is {number}" if report.generation != number else ""
        case _:
            return ""


def _stale_step(state: State, report: StepDone | StepFailed) -> str:
    running = state.running
    if running is None:
        return f"step {report.step} is not running"
    order = running.order
    if (report.step, report.attempt) != (order.step, order.attempt):
        return f"step {report.step}, attempt {report.attempt}; running is {order.step}, attempt {order.attempt}"
    if isinstance(report, StepDone) and report.generation != running.generation:
        return f"generation {report.generation}; it runs in {running.generation}"
    return ""


def told(event: ReplicaJoined | Reported, report: Report | None, undone: int) -> set[str]:
    """Parts of a state that a stale report may change: how many there were, and what the replica holds.

    Args:
        event: What happened.
        report: What was reported, decoded.
        undone: What was held in generations up to this one was undone.
    """
    if not isinstance(event, Reported):
        return set()
    is_undone = isinstance(report, StepDone | GenerationFormed) and report.generation <= undone
    return {f"{event.name}.received"} | (set() if is_undone else {f"{event.name}.step"})
