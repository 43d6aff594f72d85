"""The write-ahead log of a run: its state and its journal, which change together or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from cosmos_core.control.journal import Journal
from cosmos_core.control.machine import core
from cosmos_core.control.machine.events import ControllerStarted, Event, ReplicaLost
from cosmos_core.control.machine.invariants import check
from cosmos_core.control.machine.state import State

_LOG: Final = logging.getLogger(__name__)


def begin_term(state: State, journal: Journal) -> ControllerStarted:
    """Have a controller take a run over; what is in the journal by then is settled on return.

    A term that could be lost with the end of the journal would come again, and nobody could tell its controller from
    the one before.
    """
    started = ControllerStarted(term=state.term + 1)
    core.step(state, started)
    journal.append(started)
    journal.settle()
    return started


class WriteAheadLog:
    """Takes events into the state and the journal, whose fold it is; their only writer.

    `note` is told of each event once the state has taken it in. `committed` is called when something is durable, and by
    the first commit in any case, before anything that follows from it is said.
    """

    def __init__(
        self, state: State, journal: Journal, note: Callable[[Event], None], committed: Callable[[], None]
    ) -> None:
        self.state: Final = state
        self.num_events = 0
        self._journal: Final = journal
        self._note: Final = note
        self._committed: Final = committed
        self._is_new = True
        self._checked_step = state.step

    def record(self, event: Event) -> None:
        """Take an event in; nothing that follows from it may be said before the next commit.

        A report that cannot be read is a TransportError: it changes nothing, and is not kept.
        """
        core.step(self.state, event)
        self._note(event)
        self._journal.append(event)
        self.num_events += 1

    def lose(self, name: str, incarnation: str, reason: str) -> None:
        """Take a replica's process for lost."""
        _LOG.warning("lost %s (incarnation %s): %s", name, incarnation, reason)
        self.record(ReplicaLost(name=name, incarnation=incarnation, reason=reason))

    def commit(self) -> None:
        """Make all that was taken in durable; an AssertionError says that the accounting of the run is broken."""
        number = self._journal.commit()
        if number or self._is_new:
            self._committed()
            self._is_new = False
        if self.state.step != self._checked_step:
            self._checked_step = self.state.step
            check(self.state)
