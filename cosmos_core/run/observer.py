"""A connection to the controller that watches the run, and passes on what people ask of it.

`Watch` is repeated with the last sequence number seen whenever nothing came for a second, so a restarted controller
or a lost message costs a second, never an event; and after every ten messages with entries, which lets more come.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Final

import zmq

from cosmos_core.control.machine.events import EVENTS, Event
from cosmos_core.errors import TransportError
from cosmos_core.transport import sockets
from cosmos_core.transport.keys import Key
from cosmos_core.transport.messages import DOWN, REQUEST, UP, Answer, Command, Notices, Refused, Request, Watch
from cosmos_core.transport.sockets import HANDSHAKE_EVENTS, Closing, Handshakes

_SILENCE_S: Final = 1.0
_ANSWER_S: Final = 5.0
_POLL_S: Final = 0.1
_RENEW_S: Final = 10.0  # the controller forgets observers that do not say that they are still there
_RENEW_BATCHES: Final = 10  # and sends so many more ahead


class Connection(Closing):
    """A connection to the controller; nothing needs to listen at `tcp://HOST:PORT` yet. Only tests have no key."""

    def __init__(self, name: str, address: str, key: Key | None) -> None:
        self._context: Final = zmq.Context()
        identity = f"{name}-{secrets.token_hex(8)}".encode()
        curve = None if key is None else sockets.Curve(own=key.pair, server=key.server)
        self._socket: Final = sockets.dealer(self._context, address, identity, curve=curve, events=HANDSHAKE_EVENTS)
        self._handshakes: Final = Handshakes(self._socket, address)

    def close(self) -> None:
        """Close it."""
        self._handshakes.close()
        self._socket.close()
        self._context.term()


class Observer(Connection):
    """Receives the journal in order, without gaps or repeats.

    Attributes:
        gauges: The newest gauges of each process.
        newest: Number of the journal's newest entry, as the controller told it last; -1 before it did.
        refusal: Why the controller does not take this observer in for now; empty if it does. It is asked again.
        answers: Why each request that was answered was refused, by its `ident`; empty where it was taken in.
    """

    def __init__(self, address: str, run_id: str, key: Key | None = None) -> None:
        super().__init__("observer", address, key)
        self._run_id: Final = run_id
        self._watched_at = float("-inf")
        self._heard_at = float("-inf")
        self._num_batches = 0
        # Since when nothing was left to receive, though entries are missing.
        self._dry_since = float("inf")
        self._has_gap = False
        self._again_at = float("-inf")
        self.refusal = ""
        self.last_sequence = 0
        self.gauges: dict[str, dict[str, float]] = {}
        self.num_gauges = 0
        self.newest = -1
        self.answers: Final[dict[str, str]] = {}

    def poll(self, timeout_s: float) -> list[tuple[int, float, Event]]:
        """New journal entries (sequence, unix time, event), in order; waits at most `timeout_s` for some."""
        self._watch()
        fresh: list[tuple[int, float, Event]] = []
        if self._socket.poll(int(timeout_s * 1000)):
            while not fresh and (notices := self._receive()) is not None:
                fresh = self._accept(notices)
        if fresh or self.newest <= self.last_sequence:
            self._dry_since = float("inf")
        else:
            self._dry_since = min(self._dry_since, time.monotonic())
        self._handshakes.check()
        return fresh

    @property
    def silence_s(self) -> float:
        """Seconds since the controller was heard last; infinite before that."""
        return time.monotonic() - self._heard_at

    def ask(self, request: Request, ident: str) -> None:
        """Ask the run for something; to be repeated until `answers` has `ident`, or the run's state shows it."""
        command = Command(run_id=self._run_id, ident=ident, request=REQUEST.encode(request))
        sockets.offer(self._socket, [UP.encode(command)])

    def _watch(self) -> None:
        now = time.monotonic()
        waited = now - self._watched_at
        is_silent = waited >= _SILENCE_S and now - self._heard_at >= _SILENCE_S
        is_lost = self._has_gap or now - self._dry_since >= _SILENCE_S
        again = is_lost and now - self._again_at >= _SILENCE_S  # what is sent again may come behind more with a gap
        if not (again or is_silent or waited >= _RENEW_S or self._num_batches >= _RENEW_BATCHES):
            return
        self._watched_at = now
        watch = Watch(run_id=self._run_id, after=self.last_sequence, again=again)
        if sockets.offer(self._socket, [UP.encode(watch)]):
            self._num_batches = 0
            if again:
                self._has_gap, self._again_at = False, now

    def _receive(self) -> Notices | None:
        """The next notices; None if nothing more has come. Answers are noted on the way."""
        while True:
            try:
                message = DOWN.decode(sockets.receive(self._socket, parts=1)[0])
            except zmq.Again:
                return None
            if isinstance(message, Notices):
                return message
            if isinstance(message, Refused):
                if message.is_final:
                    raise TransportError(f"the controller refuses: {message.reason}")
                self._heard_at, self.refusal = time.monotonic(), message.reason
                continue
            if not isinstance(message, Answer):
                raise TransportError(f"the controller sent an observer {type(message).__name__}, not Notices")
            self.answers[message.ident] = message.refusal

    def _accept(self, notices: Notices) -> list[tuple[int, float, Event]]:
        self._heard_at = time.monotonic()
        self.refusal = ""
        self.newest = notices.last
        self._num_batches += bool(notices.entries)
        if notices.gauges:
            self.gauges = notices.gauges
            self.num_gauges += 1
        fresh: list[tuple[int, float, Event]] = []
        for sequence, when, data in notices.entries:
            if sequence > self.last_sequence + 1:
                self._has_gap = True
                break
            if sequence == self.last_sequence + 1:
                fresh.append((sequence, when, EVENTS.decode(data)))
                self.last_sequence = sequence
        return fresh


def so_far(
    address: str, run_id: str, key: Key | None = None, *, gauges: dict[str, dict[str, float]] | None = None
) -> Iterator[tuple[int, float, Event]]:
    """The journal of a run that goes on, up to now: (sequence, unix time, event), in order.

    `gauges` is filled with the newest gauges of each process, if there are any.
    """
    deadline = time.monotonic() + _ANSWER_S
    with Observer(address, run_id, key) as observer:
        end: int | None = None
        while end is None or observer.last_sequence < end:
            if found := observer.poll(_POLL_S):
                yield from found
                deadline = time.monotonic() + _ANSWER_S
            if end is None and observer.newest >= 0:
                end = observer.newest
            if time.monotonic() > deadline:
                if observer.refusal:
                    raise TransportError(f"the controller at {address} shows nothing: {observer.refusal}")
                raise TransportError(
                    f"the controller at {address} does not answer: it has not sent its journal within {_ANSWER_S:g} s; "
                    "it hangs, or is stopped (see logs/controller.log in the run's folder)"
                )
        if gauges is not None:
            gauges.update(observer.gauges)
