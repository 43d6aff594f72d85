"""Observers: whoever watches the run gets its journal, entry by entry, and gauges twice a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from cosmos_core.control.journal import Journal
from cosmos_core.transport.messages import Notices, Refused

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
