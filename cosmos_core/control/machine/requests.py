"""What people ask of a run: whether it can be, and what it makes of the state."""

from __future__ import annotations

from cosmos_core.control.machine import changes, leaving, progress, reach
from cosmos_core.control.machine.events import Commanded
from cosmos_core.control.machine.state import State
from cosmos_core.errors import ConfigError
from cosmos_core.transport.requests import Drain, Lost, Request, Set, Stop
from cosmos_core.transport.wire import REQUEST


def refusal(state: State, request: Request) -> str:
    """Why the run cannot do what is asked; empty if it can.

    Args:
        state: The run's; not changed.
        request: What a person asks.
    """
    if state.outcome and not isinstance(request, Stop):
        return f"the run is over ({state.outcome})"
    match request:
        case Stop() | Lost():
            return ""
        case Drain():
            return leaving.refusal(state, request.name)
        case Set():
            return _refusal_of_change(state, request)


def _refusal_of_change(state: State, request: Set) -> str:
    try:
        return reach.refusal(state, changes.asked_of(state, request))
    except ConfigError as error:
        return str(error)


def take(state: State, event: Commanded) -> None:
    """Do what was asked; once, however often it was.

    Raises:
        TransportError: It is no request; nothing was changed.
    """
    request = REQUEST.decode(event.request)
    if event.ident in state.commands:
        return
    state.commands.add(event.ident)
    match request:
        case Stop():
            state.is_stopping = True
            state.touch()
        case Drain():
            leaving.drain(state, request.name)
        case Set():
            changes.take(state, request)
            if not state.attempts:
                progress.enter_step(state)
        case _:
            pass
