"""The controller's server: one thread that drains the socket, lets the server loop work, and sends what it says.

Nothing waits: what cannot be sent is said again later, because directives are repeated until they are confirmed.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import attrs
import zmq

from cosmos_core.config.schema import ControlConfig
from cosmos_core.control.journal import Journal
from cosmos_core.control.machine.state import State
from cosmos_core.control.page.window import PAGE, Window
from cosmos_core.control.recovery_snapshots import RecoverySnapshots
from cosmos_core.control.server_loop import ServerLoop
from cosmos_core.errors import TransportError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.transport import sockets
from cosmos_core.transport.authentication import Listener, refusal
from cosmos_core.transport.messages import DOWN, UP, Answer, Command, Down, Notices, Refused, Up
from cosmos_core.transport.sockets import receive_marked

_SPARE_IDENTITIES: Final = 1000


class Inbox:
    """Takes messages in at a socket. Used by the server's thread.

    Without authentication, anyone may say anything. It counts messages that could not be read (`malformed`), and
    those of who may not say them (`refused`).
    """

    def __init__(self, listener: Listener) -> None:
        self._listener: Final = listener
        self._keys: Final[dict[bytes, str]] = {}
        self._num_changes = 0
        self._most_keys = _SPARE_IDENTITIES
        self.malformed, self.refused = RepeatedWarning(__name__), RepeatedWarning(__name__)

    def take(self, answer: Callable[[bytes, Refused | Answer], bool]) -> tuple[bytes, Up] | None:
        """The next message, with the identity that it came from; zmq.Again if there is none.

        None where one cannot be taken; who may not say it is answered.
        """
        try:
            first, body = receive_marked(self._listener.socket, parts=2)
            identity = first.bytes
            if self._listener.authenticator is None:
                return identity, UP.decode(b"".join(body))
            peer = self._listener.who(first)
            message = None if peer is None else UP.decode(b"".join(body))
        except TransportError as error:
            self.malformed("ignored a message: %s", error)
            return None
        reason = "its key may not speak here (any more)"
        if peer is not None and message is not None and not (reason := refusal(peer, message)):
            self._keys[identity] = peer.public
            return identity, message
        self.refused("refused a message: %s", reason)
        if isinstance(message, Command):
            answer(identity, Answer(ident=message.ident, refusal=reason))
        else:
            answer(identity, Refused(reason=reason, is_final=True))
        return None

    def revoked(self, known: Callable[[], Collection[bytes]]) -> list[bytes]:
        """Identities that speak with a key that may not any more; empty unless the allow-list has changed.

        `known` are those of replicas and observers; others are forgotten. Asked seldom, as there may be thousands.
        """
        authenticator = self._listener.authenticator
        if authenticator is None:
            return []
        if len(self._keys) > self._most_keys:
            kept = set(known())
            for identity in self._keys.keys() - kept:
                del self._keys[identity]
            self._most_keys = 2 * len(kept) + _SPARE_IDENTITIES
        if authenticator.allowed.num_changes == self._num_changes:
            return []
        self._num_changes = authenticator.allowed.num_changes
        return [identity for identity, public in self._keys.items() if authenticator.find(public) is None]

    def gauges(self) -> dict[str, float]:
        """Counts of what was not taken, for observers."""
        return {
            "messages_malformed": self.malformed.count,
            "messages_refused": self.refused.count,
            "connections_refused": self._listener.num_refused,
        }


_BATCH: Final = 500
_MAX_BATCHES: Final = 20
"""Sent to one observer beyond what it said that it has: whoever comes late to a long run must not keep the replicas
waiting, and to a slow one nothing is sent twice."""
_GAUGES_S: Final = 0.5
_FORGET_S: Final = 30.0
_MOST: Final = 64
"""Observers at once, besides one for each replica of the run: whoever started it follows the run."""


@attrs.define
class _Observer:
    confirmed: int
    sent: int
    watched_at: float
    gauges_at: float = 0.0


class Observers:
    """Sends committed entries of the journal to the clients that watch a run."""

    def __init__(
        self, journal: Journal, send: Callable[[bytes, Notices | Refused], bool], num_replicas: Callable[[], int]
    ) -> None:
        self._journal: Final = journal
        self._send: Final = send
        self._num_replicas: Final = num_replicas
        self._observers: Final[dict[bytes, _Observer]] = {}

    @property
    def identities(self) -> frozenset[bytes]:
        """The identities of those who watch."""
        return frozenset(self._observers)

    def forget(self, identity: bytes) -> None:
        """Show nothing more to an observer, if it is one."""
        self._observers.pop(identity, None)

    def watch(self, identity: bytes, after: int, now: float, *, again: bool = False) -> None:
        """Show the journal from `after` on, which the observer has; `again`: also what was sent of that already."""
        observer = self._observers.get(identity)
        if observer is None:
            most = _MOST + self._num_replicas()
            if len(self._observers) >= most:
                self._send(identity, Refused(reason=f"{most} observers watch the run already; it is tried again"))
                return
            observer = self._observers[identity] = _Observer(after, after, now)
        observer.sent = after if again else max(observer.sent, after)
        observer.confirmed, observer.watched_at = after, now

    def show(self, now: float, gauges: Callable[[], dict[str, dict[str, float]]], *, is_last: bool = False) -> None:
        """Send what is new; gauges when they are due, or for the last time."""
        for identity, observer in list(self._observers.items()):
            if now - observer.watched_at > _FORGET_S:
                del self._observers[identity]
                continue
            if is_last or now - observer.gauges_at >= _GAUGES_S:
                observer.gauges_at = now
                self._send(identity, Notices(entries=(), last=self._journal.last, gauges=gauges()))
            self._catch_up(identity, observer)

    def _catch_up(self, identity: bytes, observer: _Observer) -> None:
        end = min(observer.confirmed + _MAX_BATCHES * _BATCH, self._journal.last)
        while observer.sent < end:
            entries = self._journal.read(observer.sent, min(_BATCH, end - observer.sent))
            notices = Notices(entries=tuple(entries), last=self._journal.last, gauges={})
            if not entries or not self._send(identity, notices):
                return
            observer.sent = entries[-1][0]


_POLL_MS: Final = 100
_MAX_MESSAGES: Final = 2000


class Server:
    """Serves one run on one socket until it has ended. It is the only writer of the journal, whose fold is the state.

    `facts` are what replicas must have in common with the run (`config.fingerprint`); None compares nothing.
    """

    def __init__(
        self,
        state: State,
        journal: Journal,
        listener: Listener,
        control: ControlConfig,
        snapshots: RecoverySnapshots,
        *,
        window: Window | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self._socket: Final = listener.socket
        self._inbox: Final = Inbox(listener)
        self._window: Final = window
        note = (lambda _: None) if window is None else functools.partial(window.note, state)
        committed = functools.partial(snapshots.note, state)
        self._loop: Final = ServerLoop(state, journal, control, time.monotonic(), facts, note=note, committed=committed)
        self._observers: Final = Observers(journal, self._offer, lambda: len(state.replicas))

    def run(self, stop: threading.Event) -> bool:
        """Serve until the run has ended and everyone was told, or `stop` is set; whether it has ended.

        A JournalError ends it, too: nothing that follows from what could not be made durable has left.
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
        for command in () if self._window is None else self._window.asked(self._loop.state.settings.run_id):
            self._loop.take(PAGE, command, now)
        is_over = self._loop.turn(now, self._say)
        self._observers.show(now, self._gauges, is_last=is_over)
        if self._window is not None:
            self._window.show(self._loop.state, self._gauges, now, is_last=is_over)
        return is_over

    def _drain(self, now: float) -> None:
        for _ in range(_MAX_MESSAGES):
            try:
                taken = self._inbox.take(self._offer)
            except zmq.Again:
                break
            if taken is not None:
                self._loop.take(*taken, now)
        # Of those whose keys were revoked replicas are lost, and observers see no more.
        for identity in self._inbox.revoked(self._speakers):
            self._observers.forget(identity)
            self._loop.shut_out(identity, "its key was revoked")
        for identity, watch in self._loop.watches:
            self._observers.watch(identity, watch.after, now, again=watch.again)
        self._loop.watches.clear()

    def _speakers(self) -> set[bytes]:
        return {line.identity for _, line in self._loop.lines.items()} | self._observers.identities

    def _gauges(self) -> dict[str, dict[str, float]]:
        gauges = self._loop.gauges()
        gauges["controller"] |= self._inbox.gauges()
        return gauges

    def _say(self, identity: bytes, message: Down) -> bool:
        if identity is PAGE and self._window is not None:
            self._window.answer(message)
            return True
        return self._offer(identity, message)

    def _offer(self, identity: bytes, message: Down) -> bool:
        return sockets.offer(self._socket, [identity, DOWN.encode(message)])
