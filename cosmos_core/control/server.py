"""The controller's server: one thread that drains the socket, lets the desk work, and sends what it says.

Nothing waits: what cannot be sent is said again later, because directives are repeated until they are confirmed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping
from typing import Final

import zmq

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.accounts import Accounted, Accounts
from cosmos_core.control.desk import Desk
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.state import State
from cosmos_core.control.noted import Noted
from cosmos_core.control.observers import Observers
from cosmos_core.control.page.window import PAGE, Window
from cosmos_core.control.reception import Reception, Turned
from cosmos_core.transport import sockets
from cosmos_core.transport.door import Guarded
from cosmos_core.transport.messages import Down
from cosmos_core.transport.wire import DOWN

_POLL_MS: Final = 100
_MAX_MESSAGES: Final = 2000


class Server:
    """Serves one run on one socket until it has ended.

    Args:
        state: The fold of `journal`.
        journal: Open; this server is its only writer.
        guarded: Where it listens, and who may speak there (`transport.door.listen`).
        control: Intervals and time limits.
        accounts: Where to keep what a new journal could go on from.
        window: The controller's side of the web page; None without one.
        facts: What replicas must have in common with the run (`config.kinship`); None compares nothing.
    """

    def __init__(
        self,
        state: State,
        journal: Journal,
        guarded: Guarded,
        control: ControlConfig,
        accounts: Accounts,
        *,
        window: Window | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self._socket: Final = guarded.socket
        self._reception: Final = Reception(guarded)
        self._window: Final = window
        kept = Accounted(journal, accounts, state)
        noted = kept if window is None else Noted(kept, functools.partial(window.note, state))
        self._desk: Final = Desk(state, noted, control, time.monotonic(), facts)
        self._observers: Final = Observers(journal, self._offer, lambda: len(state.replicas))

    def run(self, stop: threading.Event) -> bool:
        """Serve until the run has ended and everyone was told, or `stop` is set; whether it has ended.

        Raises:
            JournalError: An event could not be made durable; nothing that follows from it has left.
        """
        while not stop.is_set():
            self._socket.poll(_POLL_MS)
            if self.turn():
                return True
        return False

    def turn(self) -> bool:
        """Take in what has arrived and answer; whether the run has ended and everyone was told."""
        now = time.monotonic()
        self._drain(now)
        for command in () if self._window is None else self._window.asked(self._desk.state.settings.run_id):
            self._desk.take(PAGE, command, now)
        is_over = self._desk.turn(now, self._say)
        self._observers.show(now, self._gauges, is_last=is_over)
        if self._window is not None:
            self._window.show(self._desk.state, self._gauges, now, is_last=is_over)
        return is_over

    def _drain(self, now: float) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                taken = self._reception.take()
            except zmq.Again:
                break
            if not isinstance(taken, Turned):
                self._desk.take(*taken, now)
            elif taken.answer is not None:
                self._offer(taken.identity, taken.answer)
        self._shut_out()
        for identity, watch in self._desk.watches:
            self._observers.watch(identity, watch.after, now, again=watch.again)
        self._desk.watches.clear()

    def _shut_out(self) -> None:
        """Part with those whose keys were revoked: replicas are lost, observers see no more."""
        for identity in self._reception.revoked(self._speakers):
            self._observers.forget(identity)
            self._desk.shut_out(identity, "its key was revoked")

    def _speakers(self) -> set[bytes]:
        return {line.identity for _, line in self._desk.lines.items()} | self._observers.identities

    def _gauges(self) -> dict[str, dict[str, float]]:
        gauges = self._desk.gauges()
        gauges["controller"] |= self._reception.gauges()
        return gauges

    def _say(self, identity: bytes, message: Down) -> bool:
        if identity is PAGE and self._window is not None:
            self._window.answer(message)
            return True
        return self._offer(identity, message)

    def _offer(self, identity: bytes, message: Down) -> bool:
        return sockets.offer(self._socket, [identity, DOWN.encode(message)])
