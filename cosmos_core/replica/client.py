"""A replica's line to its controller: a thread that owns the socket, and calls that any thread may make."""

from __future__ import annotations

import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Self

import zmq

from cosmos_core.errors import CosmosError, RefusedError, ReplicaError, TransportError
from cosmos_core.observe.logs import RepeatedWarning
from cosmos_core.replica.activity import Pulse, TakePulse
from cosmos_core.replica.session import Session
from cosmos_core.transport.bounds import REPORT_BYTES, fitted
from cosmos_core.transport.keys import Key
from cosmos_core.transport.messages import DOWN, UP, Directive, Hello, Refused
from cosmos_core.transport.outbox import Outbox
from cosmos_core.transport.reports import REPORT, Report
from cosmos_core.transport.sockets import HANDSHAKE_EVENTS, Closing, Curve, Handshakes, Socket, dealer, offer, receive
from cosmos_core.types.bounds import TEXT


class ControlClient(Closing):
    """Says hello, reports reliably, beats, and keeps the newest directive.

    Start it once; use it as a context manager, or close it. Every method may be called from any thread, but directives
    have one consumer (see `wait_directive`). On the client's thread it calls `gauges` and `take_pulse` for each beat,
    which must be quick and not raise, and `on_refused` once, when the controller does not want this replica (any more).
    Only tests have no key.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        heartbeat_s: float,
        gauges: Callable[[], Mapping[str, float]] = dict,
        *,
        key: Key | None = None,
        outbox: Outbox | None = None,
        take_pulse: TakePulse = Pulse,
        on_refused: Callable[[Refused], None] | None = None,
    ) -> None:
        self._address: Final = address
        self._curve: Final = None if key is None else Curve(own=key.pair, server=key.server)
        outbox = Outbox() if outbox is None else outbox
        self._session: Final = Session(
            hello, heartbeat_s=heartbeat_s, gauges=gauges, outbox=outbox, take_pulse=take_pulse
        )
        self._on_refused = on_refused
        self._changed: Final = threading.Condition()
        self._thread: Final = threading.Thread(target=self._run, name="control", daemon=True)
        self._context: Final[zmq.Context[Socket]] = zmq.Context()
        self._wake: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._ended = False
        self._error: BaseException | None = None
        self._taken_term = 0
        self._ignored = RepeatedWarning(__name__)

    def start(self) -> None:
        """Connect and begin to say hello; returns at once."""
        # A socket gives a connection to the newest that claims its identity, so nobody may know or guess it.
        identity = secrets.token_hex(16).encode()
        self._socket = dealer(self._context, self._address, identity, curve=self._curve, events=HANDSHAKE_EVENTS)
        self._handshakes = Handshakes(self._socket, self._address)
        self._thread.start()

    def close(self) -> None:
        """End the thread; reports that are not acknowledged yet are lost (`flush` first)."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._handshakes.close()
            self._socket.close()
        self._context.term()
        os.close(self._wake)

    def __enter__(self) -> Self:
        self.start()
        return self

    @property
    def refused(self) -> Refused | None:
        """The reason why the controller refuses this replica, or its key; None while it does not."""
        if isinstance(self._error, RefusedError):
            return Refused(reason=str(self._error), is_final=True)
        session = self._session
        return Refused(reason=session.refusal, is_final=session.is_final) if session.refusal else None

    def report(self, report: Report) -> None:
        """Tell the controller, reliably and in order, in texts as a message can hold (`fitted`); returns at once."""
        data = _encoded(report)
        if len(data) > REPORT_BYTES:
            raise TransportError(
                f"a {type(report).__name__} of {len(data):,} bytes; the controller takes at most {REPORT_BYTES:,}"
            )
        with self._changed:
            outbox = self._session.outbox
            was_sendable = outbox.is_sendable
            outbox.append(data)
            # For whatever was sendable before, the thread has been woken already.
            if outbox.is_sendable and not was_sendable and not self._closing:
                os.eventfd_write(self._wake, 1)

    def set_step(self, step: int) -> None:
        """Note the step whose weights the replica holds."""
        with self._changed:
            self._session.set_step(step)

    def wait_directive(self, after: int, timeout_s: float) -> Directive | None:
        """Wait for a directive newer than the one last returned; None if none came in time, or the client was closed.

        One consumer: numbering restarts with the controller, so `after` (0 at first) belongs to the term of the
        directive that this method returned last; a directive of a newer term is always newer. A timeout of 0 only
        looks. Raises as `check`.
        """

        def newest() -> Directive | None:
            found = self._session.directive
            if found is not None and (found.term != self._taken_term or found.revision > after):
                return found
            return None

        with self._changed:
            self._changed.wait_for(lambda: newest() or self._is_over, timeout_s)
            self._check()
            found = newest()
            if found is not None:
                self._taken_term = found.term
            return found

    def flush(self, timeout_s: float) -> bool:
        """Wait until the controller has every report; whether it has."""
        with self._changed:
            self._changed.wait_for(lambda: not len(self._session.outbox) or self._is_over, timeout_s)
            return not len(self._session.outbox)

    def check(self) -> None:
        """Raise a ReplicaError if the controller refused this replica or its key, or the client's thread failed."""
        with self._changed:
            self._check()

    @property
    def _is_over(self) -> bool:
        return self._closing or self._ended or bool(self._session.refusal)

    def _check(self) -> None:
        name = self._session.hello.name
        if self._session.refusal:
            raise ReplicaError(f"{name}: the controller refused this replica: {self._session.refusal}")
        if isinstance(self._error, CosmosError):
            raise ReplicaError(str(self._error)) from self._error
        if self._ended and not self._closing:
            raise ReplicaError(f"{name}: the line to the controller failed: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            self._talk()
        except CosmosError as error:
            self._error = error
        finally:
            # Anything else goes on to threading.excepthook, and the owner learns of it from `check`.
            with self._changed:
                self._error = self._error or sys.exception()
                self._ended = True
                self._changed.notify_all()
            self._tell_refusal()

    def _talk(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._handshakes.monitor, zmq.POLLIN)
        was_blocked = False
        while True:
            with self._changed:
                if self._closing:
                    return
                is_blocked = self._send()
                deadline = self._session.deadline()
            # A socket that takes nothing is waited for, not tried again and again.
            if is_blocked != was_blocked:
                poller.modify(self._socket, zmq.POLLIN | zmq.POLLOUT if is_blocked else zmq.POLLIN)
                was_blocked = is_blocked
            wait_s = math.inf if is_blocked else deadline - time.monotonic()
            poller.poll(None if wait_s == math.inf else max(0, math.ceil(wait_s * 1000)))
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._handshakes.check()
            self._receive()

    def _send(self) -> bool:
        """Send all that is due; whether the socket takes no more."""
        now = time.monotonic()
        while (message := self._session.next_message(now)) is not None:
            if not offer(self._socket, [UP.encode(message)]):
                return True
            self._session.sent(message, now)
        return False

    def _tell_refusal(self) -> None:
        """The owner's thread may be stuck, and never look."""
        if self._on_refused is not None and (refused := self.refused) is not None:
            tell, self._on_refused = self._on_refused, None
            tell(refused)

    def _receive(self) -> None:
        while True:
            try:
                message = DOWN.decode(receive(self._socket, 1)[0])
                with self._changed:
                    self._session.receive(message, time.monotonic())
                    self._changed.notify_all()
                self._tell_refusal()
            except zmq.Again:
                return
            except TransportError as error:
                self._ignored("ignored a message from %s: %s", self._address, error)


def _encoded(report: Report) -> bytes:
    with suppress(UnicodeEncodeError):
        data = REPORT.encode(report)
        if len(data) <= TEXT:
            return data
    return REPORT.encode(fitted(report))
