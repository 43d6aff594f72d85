"""The controller's server loop: messages in, events, one commit for all of them, then everything that follows from it.

Without sockets and without a clock of its own: time is handed in, in seconds of any monotonic clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from cosmos_core.config.fingerprint import difference
from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.connections import IsThere, Line, Lines
from cosmos_core.control.failure_detector import FailureDetector
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine import changes, core
from cosmos_core.control.machine.events import Commanded, Event, ReplicaJoined, Reported, RunEnded
from cosmos_core.control.machine.state import State
from cosmos_core.control.write_ahead_log import WriteAheadLog
from cosmos_core.errors import TransportError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.transport.messages import (
    REQUEST,
    WIRE_VERSION,
    Acknowledged,
    Answer,
    Beat,
    Command,
    Down,
    Hello,
    Inquire,
    Lost,
    Refused,
    Reports,
    Up,
    Watch,
    Welcome,
)

_LOG: Final = logging.getLogger(__name__)

_PROBE_S: Final = 0.1
_FAREWELL_S: Final = 10.0

Say: TypeAlias = Callable[[bytes, Down], bool]
"""Says something to an identity; whether that one is connected."""


class ServerLoop:
    """Handles what replicas, observers and the clock say, and knows what to answer. The journal's only writer.

    `watches` are observers that asked for the journal, and from where on; for the owner to take. `failure_detector`
    says who is gone, silent, or has not come. `note` and `committed` are as of `WriteAheadLog`.
    """

    def __init__(
        self,
        state: State,
        journal: Journal,
        control: ControlConfig,
        now: float,
        facts: Mapping[str, str] | None = None,
        *,
        note: Callable[[Event], None] = lambda _: None,
        committed: Callable[[], None] = lambda: None,
    ) -> None:
        self.state: Final = state
        self.lines: Final = Lines(state, now)
        self.watches: list[tuple[bytes, Watch]] = []
        self._log: Final = WriteAheadLog(state, journal, note, committed)
        self.failure_detector: Final = FailureDetector(self._log, self.lines, control, now)
        self._facts: Final = facts or {}
        self._answers: list[tuple[bytes, Down]] = []
        self._refused = RepeatedWarning(__name__)
        self._over_at: float | None = None
        self._probed_at = -math.inf

    def turn(self, now: float, say: Say) -> bool:
        """Do what is due after messages were taken in, and say what follows, each thing once it is durable.

        `say` also asks whether somebody is connected, as no connection tells that unless it is used. Returns whether
        the run has ended and everyone was told.
        """

        def is_there(name: str, line: Line) -> bool:
            """True if a replica is connected; one that was never heard under this controller is not."""
            farewell = Acknowledged(term=self.state.term, acknowledged=self.state.replicas[name].received)
            return bool(line.identity) and say(line.identity, farewell)

        def settle() -> None:
            for identity, message in self.commit(now):
                say(identity, message)

        settle()  # before the rest, because whoever is asked whether they are there is told what was received
        self.failure_detector.look(now, is_there)
        settle()
        if not self.state.outcome or not self._are_gone(now, is_there):
            return False
        if not self.state.has_ended:
            self._log.record(RunEnded(outcome=self.state.outcome, reason=self.state.reason))
        settle()
        return True

    def _are_gone(self, now: float, is_there: IsThere) -> bool:
        """True if every replica has left, which it does once it has been told and has said all it had to say."""
        if self._over_at is None:
            self._over_at = now
        lines = self.lines.items()
        if now - self._over_at > _FAREWELL_S:
            _LOG.warning("gave up waiting for %s to end", ", ".join(name for name, _ in lines))
            return True
        if now - self._probed_at < _PROBE_S:
            return False
        self._probed_at = now
        return not any(is_there(name, line) for name, line in lines)

    def take(self, identity: bytes, message: Up, now: float) -> None:
        """Take a message in."""
        match message:
            case Reports():
                self._on_reports(identity, message, now)
            case Beat():
                line = self._current_line(identity, message, now)
                if line is not None:
                    line.beat(message, now)
            case Hello():
                self._on_hello(identity, message, now)
            case Watch() | Command() | Inquire():
                self._on_person(identity, message)

    def _on_person(self, identity: bytes, message: Watch | Command | Inquire) -> None:
        own = self.state.settings.run_id
        if message.run_id != own:
            self._answers.append((identity, Refused(reason=f"this is run {own}, not {message.run_id}", is_final=True)))
            return
        match message:
            case Watch():
                self.watches.append((identity, message))
            case Command():
                self._on_command(identity, message)
            case Inquire():
                self._answers.append((identity, changes.settable(self.state)))

    def _on_command(self, identity: bytes, command: Command) -> None:
        refusal = ""
        if command.ident not in self.state.commands:
            try:
                request = REQUEST.decode(command.request)
                refusal = core.refusal(self.state, request)
            except TransportError as error:
                refusal = str(error)
            if not refusal and isinstance(request, Lost):
                # A fact, like silence: it is journaled as that, and once it is, nothing is left of the request.
                if self.lines.find(request.name, request.incarnation) is not None:
                    self._log.lose(request.name, request.incarnation, request.reason)
            elif not refusal:
                self._log.record(Commanded(ident=command.ident, request=command.request))
        self._answers.append((identity, Answer(ident=command.ident, refusal=refusal)))

    def _on_hello(self, identity: bytes, hello: Hello, now: float) -> None:
        state = self.state
        if refused := self._refusal(hello):
            self._refused("refused %s (pid %d on %s): %s", hello.name, hello.pid, hello.host, refused.reason)
            self._answers.append((identity, refused))
            return
        line = self.lines.find(hello.name, hello.incarnation)
        if line is None:
            present = state.replicas.get(hello.name)
            if present is not None:
                self._log.lose(present.name, present.incarnation, "another process took its name")
            fields = ("name", "role", "incarnation", "host", "pid", "step", "endpoints", "rack")
            self._log.record(ReplicaJoined(**{field: getattr(hello, field) for field in fields}))
            line = self.lines.open(hello.name, hello.incarnation, now)
            _LOG.info("%s joined (pid %d on %s, incarnation %s)", hello.name, hello.pid, hello.host, hello.incarnation)
        self.lines.hear(hello.name, line, identity, now)
        line.acknowledged = state.replicas[hello.name].received
        self._answers.append((identity, Welcome(term=state.term, acknowledged=line.acknowledged)))

    def _refusal(self, hello: Hello) -> Refused | None:
        if objection := self._objection(hello):
            return Refused(reason=objection, is_final=True)
        if hello.incarnation in self.state.fenced:
            return Refused(reason=f"it was given up ({self.state.fenced[hello.incarnation]}); start it again")
        return None

    def _objection(self, hello: Hello) -> str:
        """The objection to a hello that another process in its place would meet as well; empty if there is none."""
        settings = self.state.settings
        if hello.wire != WIRE_VERSION:
            return f"it speaks wire version {hello.wire}, this controller {WIRE_VERSION}; install the same cosmos-core"
        if hello.run_id != settings.run_id:
            return f"it belongs to run {hello.run_id}, this is {settings.run_id}"
        if hello.facts and self._facts and (found := difference(self._facts, hello.facts)):
            return f"{found}; give it this run's folder and the same packages"
        if self.state.outcome and hello.name not in self.state.replicas:
            return f"the run is over ({self.state.outcome})"
        return ""

    def _on_reports(self, identity: bytes, message: Reports, now: float) -> None:
        line = self._current_line(identity, message, now)
        if line is None:
            return
        replica = self.state.replicas[message.name]
        # A gap is left alone: the replica goes back to what was not acknowledged, which its welcome has agreed on.
        skip = replica.received + 1 - message.first
        if skip < 0:
            return
        if skip >= len(message.reports):
            self._answers.append((identity, Acknowledged(term=self.state.term, acknowledged=replica.received)))
            return
        for number, report in enumerate(message.reports[skip:], start=replica.received + 1):
            if not self._on_report(identity, message, number, report):
                return
        if message.name not in self.state.replicas:
            # It has left, and has no line any more; its farewell is confirmed all the same.
            _LOG.info("%s has left (incarnation %s)", message.name, message.incarnation)
            self._answers.append((identity, Acknowledged(term=self.state.term, acknowledged=replica.received)))

    def _on_report(self, identity: bytes, message: Reports, number: int, report: bytes) -> bool:
        try:
            self._log.record(
                Reported(name=message.name, incarnation=message.incarnation, sequence=number, report=report)
            )
        except TransportError as error:
            self._answers.append((identity, Refused(reason=f"its report {number} cannot be read: {error}")))
            self._log.lose(message.name, message.incarnation, f"its report {number} cannot be read: {error}")
            return False
        return True

    def _current_line(self, identity: bytes, message: Beat | Reports, now: float) -> Line | None:
        """The line of a sender that is in the run and knows this term; others are told where they stand."""
        line = self.lines.find(message.name, message.incarnation)
        if line is None:
            if fence := self.state.fenced.get(message.incarnation):
                self._answers.append((identity, Refused(reason=f"it was given up ({fence}); start it again")))
            return None
        if message.term > self.state.term or (message.term == self.state.term and not line.identity):
            self._refuse_strange_term(identity, message)
            return None
        self.lines.hear(message.name, line, identity, now)
        if message.term != self.state.term:
            received = self.state.replicas[message.name].received
            self._answers.append((identity, Acknowledged(term=self.state.term, acknowledged=received)))
            return None
        return line

    def _refuse_strange_term(self, identity: bytes, message: Beat | Reports) -> None:
        """Lose a sender that knows a term which nobody can have told it, were this journal the one of its run."""
        reason = (
            f"it was told of term {message.term} by another controller than this one of term {self.state.term}: the "
            "journal lost its end, or is an older copy"
        )
        self._answers.append((identity, Refused(reason=f"{reason}; start it again")))
        self._log.lose(message.name, message.incarnation, reason)

    def shut_out(self, identity: bytes, reason: str) -> None:
        """Lose the replica that speaks from an identity, if one does, and tell it why, for good."""
        for name, line in self.lines.items():
            if line.identity == identity:
                self._answers.append((identity, Refused(reason=reason, is_final=True)))
                self._log.lose(name, line.incarnation, reason)

    def commit(self, now: float) -> list[tuple[bytes, Down]]:
        """Make all that happened durable, and return what can now be said, by identity."""
        self._log.commit()
        answers, self._answers = self._answers, []
        return [*answers, *self.lines.due(now)]

    def gauges(self) -> dict[str, dict[str, float]]:
        """Newest gauges of each replica, and of the controller."""
        gauges = {name: line.gauges for name, line in self.lines.items()}
        ledger = self.state.ledger
        gauges["controller"] = {
            "queued": len(ledger.queued),
            "in_flight": len(ledger.in_flight),
            "finished": len(ledger.finished),
            "batched": len(ledger.batched),
            "events": self._log.num_events,
            "hellos_refused": self._refused.count,
        }
        return gauges
