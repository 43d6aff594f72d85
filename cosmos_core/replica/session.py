"""One replica's side of the control protocol, without sockets, threads or a clock.

What to say next is derived from what is known, so a message that could not be sent is simply still due. Time is
handed in, in seconds of any monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import attrs

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.replica.activity import Pulse, TakePulse
from cosmos_core.transport.messages import Acknowledged, Beat, Directive, Down, Hello, Refused, Reports, Welcome
from cosmos_core.transport.outbox import Outbox

HELLO_S: Final = 1.0
RESEND_S: Final = 0.5
"""Silence on reports after which the oldest are said again; twice as long each time, up to `LONGEST_RESEND_S`."""
LONGEST_RESEND_S: Final = 10.0
SILENCE_S: Final = 10.0
"""Silence of the controller after which the replica says hello again, in case the controller forgot it."""

_BATCH_REPORTS: Final = 512
_BATCH_BYTES: Final = 1 << 20


@attrs.define(eq=False)
class Session:
    """The protocol state of one incarnation of a replica towards its controller. Not thread-safe.

    `gauges` and `take_pulse` are called for each beat; they must be quick and not raise. The owner keeps the step of
    `hello` current. A `refusal` says why the controller does not want this replica, or has forgotten what it told it;
    one that `is_final` would hold for another process in this one's place as well.
    """

    hello: Hello
    _heartbeat_s: float
    _gauges: Callable[[], Mapping[str, float]]
    outbox: Outbox
    _take_pulse: TakePulse = Pulse
    directive: Directive | None = attrs.field(default=None, init=False)
    refusal: str = attrs.field(default="", init=False)
    is_final: bool = attrs.field(default=False, init=False)
    # Invariant: welcomed <= term, the newest term heard of. Reports and beats are only said when they are equal.
    _term: int = attrs.field(default=0, init=False)
    _welcomed: int = attrs.field(default=0, init=False)
    _hello_at: float = attrs.field(default=-math.inf, init=False)
    _beat_at: float = attrs.field(default=math.inf, init=False)
    _resend_at: float = attrs.field(default=math.inf, init=False)
    _resend_s: float = attrs.field(default=RESEND_S, init=False)
    # Up to this number reports were said before; until it is acknowledged, one batch at a time is said again: what a
    # slow controller has not answered may all lie in its queue.
    _repeated_to: int = attrs.field(default=0, init=False)
    _heard_at: float = attrs.field(default=math.inf, init=False)

    @property
    def is_welcome(self) -> bool:
        """True if the newest controller heard of has accepted this replica."""
        return self._term > 0 and self._welcomed == self._term

    def deadline(self) -> float:
        """When `next_message` may have something to say, if nothing is received and nothing is reported before."""
        if self.refusal:
            return math.inf
        if not self.is_welcome:
            return self._hello_at
        return min(self._beat_at, self._resend_at, self._heard_at + SILENCE_S, self._hello_at)

    def next_message(self, now: float) -> Hello | Beat | Reports | None:
        """The message to send now; the same again until `sent` is told that it was sent. None: nothing."""
        if self.refusal:
            return None
        if now >= self._heard_at + SILENCE_S:
            self._heard_at = now
            self._hello_at = now
        if now >= self._hello_at:
            return self.hello
        if not self.is_welcome:
            return None
        if now >= self._beat_at:
            return self._beat()
        if now >= self._resend_at:
            self._resend_at = math.inf
            self._resend_s = min(2 * self._resend_s, LONGEST_RESEND_S)
            self._repeated_to = max(self._repeated_to, self.outbox.newest_sent)
            self.outbox.go_back()
        if self.outbox.acknowledged < min(self._repeated_to, self.outbox.newest_sent):
            return None
        return self._reports()

    def sent(self, message: Hello | Beat | Reports, now: float) -> None:
        """Note that a message of `next_message` was handed to the socket."""
        match message:
            case Hello():
                self._hello_at = math.inf if self.is_welcome else now + HELLO_S
            case Beat():
                self._beat_at = now + self._heartbeat_s
            case Reports():
                self.outbox.sent(message.first + len(message.reports) - 1)
                self._resend_at = min(self._resend_at, now + self._resend_s)

    def receive(self, message: Down, now: float) -> None:
        """Take in a message of the controller; one of an older term, or nothing new, changes nothing."""
        if isinstance(message, Welcome | Directive | Acknowledged) and message.acknowledged > self.outbox.last:
            raise ReplicaError(
                f"{self.hello.name}: the controller acknowledges report {message.acknowledged}, but only "
                f"{self.outbox.last} were made: another process had this incarnation ({self.hello.incarnation}). Start "
                "this replica again, with one of its own"
            )
        self._heard_at = now
        match message:
            case Refused():
                self.refusal, self.is_final = message.reason or "no reason was given", message.is_final
            case Welcome() if message.term >= max(self._term, 1):
                self._on_welcome(message, now)
            case Directive() | Acknowledged() if message.term >= max(self._term, 1):
                if message.term > self._term:
                    self._term, self._hello_at = message.term, now
                if isinstance(message, Directive):
                    self._on_directive(message, now)
                self._on_acknowledged(message.term, message.acknowledged, now)
            case Welcome() | Directive() | Acknowledged():
                pass
            case _:
                raise TransportError(f"{type(message).__name__} is not for replicas")

    def _on_welcome(self, welcome: Welcome, now: float) -> None:
        if welcome.term == self._welcomed:
            self._on_acknowledged(welcome.term, welcome.acknowledged, now)
            return
        if welcome.acknowledged < self.outbox.acknowledged:
            self.refusal = (
                f"the controller of term {welcome.term} knows reports up to {welcome.acknowledged}, but "
                f"{self.outbox.acknowledged} were acknowledged: its journal lost its end (a power cut with "
                "control.durable = false, or damage), or is an older copy; start this replica again"
            )
            return
        self.outbox.acknowledge(welcome.acknowledged)
        self.outbox.go_back()
        self._resend_s, self._repeated_to = RESEND_S, 0
        self._term = self._welcomed = welcome.term
        self._hello_at = self._resend_at = math.inf
        self._beat_at = now

    def _on_directive(self, directive: Directive, now: float) -> None:
        newest = self.directive
        if newest is None or (directive.term, directive.revision) > (newest.term, newest.revision):
            self.directive = directive
            # A beat acknowledges it: soon enough to save a repetition, late enough to cover a burst of them.
            self._beat_at = min(self._beat_at, now + self._heartbeat_s / 2)

    def _on_acknowledged(self, term: int, number: int, now: float) -> None:
        if term == self._welcomed and self.outbox.acknowledge(number):
            self._resend_s = RESEND_S
            self._resend_at = now + RESEND_S if len(self.outbox) else math.inf

    def _beat(self) -> Beat:
        newest, pulse = self.directive, self._take_pulse()
        return Beat(
            name=self.hello.name,
            incarnation=self.hello.incarnation,
            term=self._term,
            revision=newest.revision if newest is not None and newest.term == self._term else 0,
            gauges={name: value for name, value in self._gauges().items() if math.isfinite(value)},
            progress=pulse.progress,
            doing=pulse.doing,
            waits=pulse.waits,
        )

    def _reports(self) -> Reports | None:
        batch = self.outbox.peek(max_reports=_BATCH_REPORTS, max_bytes=_BATCH_BYTES)
        if batch is None:
            return None
        first, reports = batch
        return Reports(
            name=self.hello.name, incarnation=self.hello.incarnation, term=self._term, first=first, reports=reports
        )

    def set_step(self, step: int) -> None:
        """Note the step whose weights the replica holds, for its next hello."""
        self.hello = attrs.evolve(self.hello, step=step)
