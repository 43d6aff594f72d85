"""The last moments of a simulated run in plain words."""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from cosmos_core.control.machine.events import Event, Reported
from cosmos_core.errors import TransportError
from cosmos_core.transport.messages import (
    REQUEST,
    Acknowledged,
    Answer,
    Beat,
    Command,
    Directive,
    Down,
    Hello,
    Refused,
    Reports,
    Up,
    Welcome,
)
from cosmos_core.transport.reports import REPORT, Report

_SHOWN: Final = ("lease", "version", "digest", "step", "attempt", "generation", "missing", "reason", "drop")


class Trace:
    """What happened, the newest last; put into words only when somebody reads it.

    Args:
        length: How much of it is kept.
    """

    def __init__(self, length: int) -> None:
        self._entries: Final[deque[tuple[float, str, str | Up | Down | Event]]] = deque(maxlen=length)

    def note(self, now: float, who: str, what: str | Up | Down | Event) -> None:
        """Keep something that happened."""
        self._entries.append((now, who, what))

    def lines(self) -> list[str]:
        """One line for each thing that happened."""
        return [f"{now:8.2f} s  {who:<12} {_worded(what)}" for now, who, what in self._entries]


def _worded(what: str | Up | Down | Event) -> str:  # noqa: C901, PLR0911 - one line for each message
    match what:
        case str():
            return what
        case Hello():
            return f"says hello as {what.incarnation}, with the weights of step {what.step}"
        case Beat():
            return f"beats in term {what.term}, has seen directive {what.revision}"
        case Reports():
            last = what.first + len(what.reports) - 1
            told = ", ".join(_encoded(report) for report in what.reports)
            return f"reports {what.first} to {last} in term {what.term}: {told}"
        case Command():
            return f"asks for {REQUEST.decode(what.request)} as {what.ident}"
        case Welcome():
            return f"is welcomed in term {what.term}; up to {what.acknowledged} is durable"
        case Refused():
            return f"is refused: {what.reason}"
        case Acknowledged():
            return f"is told in term {what.term} that up to {what.acknowledged} is durable"
        case Directive():
            return f"is told in term {what.term}, directive {what.revision}: {what.policy or what.rollout}"
        case Answer():
            return f"is answered about {what.ident}: {what.refusal or 'taken in'}"
        case Reported():
            return f"journal: report {what.sequence} of {what.incarnation}: {_encoded(what.report)}"
        case _:
            return f"journal: {what}"


def _encoded(report: bytes) -> str:
    try:
        return _report(REPORT.decode(report))
    except TransportError as error:
        return str(error)


def _report(report: Report) -> str:
    told = {field.name: getattr(report, field.name) for field in attrs.fields(type(report)) if field.name in _SHOWN}
    return f"{type(report).__name__}({', '.join(f'{name} {value}' for name, value in told.items() if value != '')})"
