"""The controller's process in a simulation: the real server_loop, a disk that fails, kills at every moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import EVENTS, Event
from cosmos_core.control.server_loop import ServerLoop
from cosmos_core.control.write_ahead_log import begin_term
from cosmos_core.errors import JournalError, TransportError
from cosmos_core.transport.messages import DOWN, UP, Down, Up
from tests.simulation.replicas import FakePolicy
from tests.simulation.simulator.disk import Disk, Killed, Opened
from tests.simulation.simulator.faults import Faults
from tests.simulation.simulator.fences import changes, fingerprint, stale_message
from tests.simulation.simulator.network import Agenda
from tests.simulation.simulator.trace import Trace
from tests.simulation.simulator.witness import Violation, Witness

Say = Callable[[bytes, bytes, float], bool]
"""Carries a message to an identity, which leaves in so many seconds; whether that process lives."""

_POLL_S: Final = 0.1
_WAKE_S: Final = 0.002
_COMPARED: Final = 8
"""Of turns without an event, one in so many is compared with the journal, too."""
_DOWN_S: Final = (0.1, 1.0, 4.0)


class Controller:
    """Starts, serves, is killed, and starts again from what its disk has.

    Args:
        agenda: Simulated time.
        rng: When it is killed.
        faults: How often; the owner changes it when faults cease.
        control: Intervals and time limits.
        disk: The journal, opened.
        witness: Sees everything.
        trace: Where what happened is kept.
        say: How it reaches others.
        policies: The policy replicas that live and are in the run, for the witness.

    Attributes:
        faults: As given.
        is_up: Whether it runs.
        num_starts: How often it was started.
    """

    def __init__(
        self,
        *,
        agenda: Agenda,
        rng: random.Random,
        faults: Faults,
        control: ControlConfig,
        disk: Disk,
        witness: Witness,
        trace: Trace,
        say: Say,
        policies: Callable[[], Iterable[FakePolicy]],
    ) -> None:
        self.faults = faults
        self.is_up = False
        self.num_starts = 0
        self._agenda: Final = agenda
        self._rng: Final = rng
        self._control: Final = control
        self._disk: Final = disk
        self._witness: Final = witness
        self._trace: Final = trace
        self._say: Final = say
        self._policies: Final = policies
        self._inbox: list[tuple[bytes, bytes]] = []
        self._free_at = 0.0
        self._plan_at: float | None = None
        self._num_plans = 0
        self._num_seen = 0
        self._start()

    def hear(self, identity: bytes, data: bytes) -> None:
        """A message arrives at its socket; nobody listens while it is down."""
        if self.is_up:
            self._inbox.append((identity, data))
            self._plan(_WAKE_S)

    def kill(self, why: str) -> None:
        """End it at once."""
        if self.is_up:
            self._trace.note(self._agenda.now, "controller", why)
            self.is_up = False
            self._inbox.clear()
            if self._journal.pending:
                self._witness.forget()
            self._agenda.after(self._rng.random() * self._rng.choice(_DOWN_S), self._start)

    def _start(self) -> None:
        state = core.fold(EVENTS.decode(data) for data in self._disk.committed)
        self._journal = Opened(self._disk, self._observe)
        self.is_up = True
        self.num_starts += 1
        if self._survives(lambda: begin_term(state, self._journal)):
            self._server_loop = ServerLoop(state, self._journal, self._control, self._agenda.now)
            self._free_at = self._agenda.now + self._journal.took_s
            self._plan_at = None
            self._plan(0.0)

    def _observe(self, event: Event) -> None:
        self._trace.note(self._agenda.now, "controller", event)
        self._witness.observe(event)

    def _plan(self, seconds: float) -> None:
        at = max(self._agenda.now + seconds, self._free_at)
        if self._plan_at is None or at < self._plan_at:
            self._plan_at = at
            self._num_plans += 1
            number = self._num_plans
            self._agenda.after(at - self._agenda.now, lambda: self._turn(number))

    def _turn(self, number: int) -> None:
        if not self.is_up or number != self._num_plans:
            return
        self._plan_at = None
        self._journal.took_s = 0.0
        if not self._survives(self._work):
            return
        self._free_at = self._agenda.now + self._journal.took_s
        self._witness.committed()
        if unknown := self._disk.keep_snapshots(self._server_loop.state):
            raise Violation("snapshot", f"the journal has not what the snapshots of steps {unknown} are of")
        if self._num_plans % _COMPARED == 0 or self._witness.num_events != self._num_seen:
            self._num_seen = self._witness.num_events
            self._witness.compare(self._server_loop.state, self._policies())
        self._plan(_POLL_S)

    def _work(self) -> None:
        inbox, self._inbox = self._inbox, []
        for identity, data in inbox:
            self._take(identity, data)
        self._server_loop.turn(self._agenda.now, self._tell)

    def _take(self, identity: bytes, data: bytes) -> None:
        message: Up = UP.decode(data)
        stale = stale_message(self._server_loop.state, message)
        before = fingerprint(self._server_loop.state) if stale else {}
        number, seen = len(self._journal.pending), self._seen(message)
        self._server_loop.take(identity, message, self._agenda.now)
        if stale:
            self._witness.num_stale += 1
            changed = changes(before, fingerprint(self._server_loop.state))
            if changed or len(self._journal.pending) != number or self._seen(message) != seen:
                what = sorted(changed) or ["the journal, or what is known of directives"]
                raise Violation("fence", f"{what} changed by {type(message).__name__} of {identity!r}, though {stale}")

    def _seen(self, message: Up) -> int:
        name = getattr(message, "name", "")
        return next((line.seen for found, line in self._server_loop.lines.items() if found == name), 0)

    def _survives(self, action: Callable[[], object]) -> bool:
        """Whether the controller does after an action; it ends where its disk fails, and must not fail otherwise."""
        try:
            action()
        except JournalError as error:
            self.kill(f"ends: {error}")
        except Killed:
            self.kill("is killed in a turn")
        except Violation:
            raise
        except (AssertionError, LookupError, ValueError, TypeError, AttributeError, NameError, TransportError) as error:
            raise Violation("conservation", f"the controller failed: {error!r}") from error
        return self.is_up

    def _tell(self, identity: bytes, message: Down) -> bool:
        """Say what may be said; a kill may come between two messages."""
        self._witness.committed()
        incarnation = identity.decode().partition("|")[2]
        self._witness.said(self._journal, incarnation, message)
        if self._rng.random() < self.faults.commit_crash / 10:
            raise Killed
        return self._say(identity, DOWN.encode(message), self._journal.took_s)
