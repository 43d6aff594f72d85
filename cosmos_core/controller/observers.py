"""Observers: whoever watches the run gets its journal, entry by entry, and gauges twice a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from cosmos_core.controller.journal import Journal
from cosmos_core.transport.messages import Notices, Refused

_BATCH: Final = 500
_MAX_BATCHES: Final = 20
"""Sent to one observer in a turn: whoever comes late to a long run must not keep the replicas waiting."""
_GAUGES_S: Final = 0.5
_FORGET_S: Final = 30.0
_MOST: Final = 64
"""Observers at once."""


@attrs.define
class _Observer:
    after: int
    watched_at: float
    gauges_at: float = 0.0


class Observers:
    """Those who watch. Only committed entries are shown.

    Args:
        journal: Where entries are read.
        send: Offers a message to an identity; whether it was taken.
    """

    def __init__(self, journal: Journal, send: Callable[[bytes, Notices | Refused], bool]) -> None:
        self._journal: Final = journal
        self._send: Final = send
        self._observers: Final[dict[bytes, _Observer]] = {}

    @property
    def identities(self) -> frozenset[bytes]:
        """Who watches."""
        return frozenset(self._observers)

    def forget(self, identity: bytes) -> None:
        """Show nothing more to an observer, if it is one."""
        self._observers.pop(identity, None)

    def watch(self, identity: bytes, after: int, now: float) -> None:
        """Show the journal from `after` on; said again, it starts again there."""
        if identity not in self._observers and len(self._observers) >= _MOST:
            self._send(identity, Refused(reason=f"{_MOST} observers watch the run already; try again later"))
            return
        observer = self._observers.setdefault(identity, _Observer(after, now))
        observer.after, observer.watched_at = after, now

    def show(self, now: float, gauges: Callable[[], dict[str, dict[str, float]]], *, is_last: bool = False) -> None:
        """Send what is new; gauges when they are due, or for the last time."""
        for identity, observer in list(self._observers.items()):
            if now - observer.watched_at > _FORGET_S:
                del self._observers[identity]
                continue
            if is_last or now - observer.gauges_at >= _GAUGES_S:
                observer.gauges_at = now
                self._send(identity, Notices(entries=(), last=self._journal.last, gauges=gauges()))
            self._catch_up(
                identity, observer, self._journal.last if is_last else observer.after + _MAX_BATCHES * _BATCH
            )

    def _catch_up(self, identity: bytes, observer: _Observer, end: int) -> None:
        while observer.after < min(end, self._journal.last):
            entries = self._journal.read(observer.after, _BATCH)
            notices = Notices(entries=tuple(entries), last=self._journal.last, gauges={})
            if not entries or not self._send(identity, notices):
                return
            observer.after = entries[-1][0]
