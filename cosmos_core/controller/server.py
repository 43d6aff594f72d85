"""The controller's server: one thread that drains the socket, lets the desk work, and sends what it says.

Nothing waits: what cannot be sent is said again later, because directives are repeated until they are confirmed.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

import zmq

from cosmos_core.config.schema import ControlConfig
from cosmos_core.controller.desk import Desk
from cosmos_core.controller.journal import Journal
from cosmos_core.controller.lines import Line
from cosmos_core.controller.machine.state import State
from cosmos_core.controller.observers import Observers
from cosmos_core.errors import TransportError
from cosmos_core.transport import sockets
from cosmos_core.transport.messages import Acknowledged, Down
from cosmos_core.transport.wire import DOWN, UP

_LOG: Final = logging.getLogger(__name__)

_POLL_MS: Final = 100
_MAX_MESSAGES: Final = 2000
_PROBE_S: Final = 0.1
_FAREWELL_S: Final = 10.0


class Server:
    """Serves one run on one socket until it has ended.

    Args:
        state: The fold of `journal`.
        journal: Open; this server is its only writer.
        socket: A bound ROUTER (`transport.sockets.router`).
        control: Intervals and time limits.
    """

    def __init__(self, state: State, journal: Journal, socket: sockets.Socket, control: ControlConfig) -> None:
        self._socket: Final = socket
        self._desk: Final = Desk(state, journal, control, time.monotonic())
        self._observers: Final = Observers(journal, self._offer)
        self._over_at: float | None = None
        self._probed_at = 0.0

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
        self._desk.tick(now)
        is_over = bool(self._desk.state.outcome) and self._are_gone(now)
        if is_over:
            self._desk.end()
        for identity, message in self._desk.commit(now):
            self._offer(identity, message)
        self._observers.show(now, self._desk.gauges, is_last=is_over)
        return is_over

    def _drain(self, now: float) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                identity, *body = sockets.receive(self._socket, parts=2)
                if len(body) == 1:
                    self._desk.take(identity, UP.decode(body[0]), now)
            except zmq.Again:
                break
            except TransportError as error:
                _LOG.warning("ignored a message: %s", error)
        for identity, after in self._desk.watches:
            self._observers.watch(identity, after, now)
        self._desk.watches.clear()

    def _are_gone(self, now: float) -> bool:
        """Whether every replica has left, which it does once it has been told and has said all it had to say."""
        if self._over_at is None:
            self._over_at = now
        lines = self._desk.lines.items()
        if now - self._over_at > _FAREWELL_S:
            _LOG.warning("gave up waiting for %s to end", ", ".join(name for name, _ in lines))
            return True
        if now - self._probed_at < _PROBE_S:
            return False
        self._probed_at = now
        return not any(self._is_there(name, line) for name, line in lines)

    def _is_there(self, name: str, line: Line) -> bool:
        """Whether a replica is connected; one that was never heard under this controller is not."""
        state = self._desk.state
        farewell = Acknowledged(term=state.term, acknowledged=state.replicas[name].received)
        return bool(line.identity) and self._offer(line.identity, farewell)

    def _offer(self, identity: bytes, message: Down) -> bool:
        return sockets.offer(self._socket, [identity, DOWN.encode(message)])
