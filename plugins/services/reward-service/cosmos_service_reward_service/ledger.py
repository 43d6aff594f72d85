"""The state of each request: pending, done, expired or never heard of. No I/O, and the clock is the caller's."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import attrs

from cosmos_core.rollout.rewards.messages import Outcome
from cosmos_core.types import JSON

Results: TypeAlias = Mapping[str, Sequence[Outcome]]
"""Of each scorer, of each completion."""

State: TypeAlias = Literal["pending", "done", "expired", "unknown"]


@attrs.define(kw_only=True, eq=False)
class Entry:
    """A request.

    Attributes:
        ticket: What it is asked for by.
        digest: Of its body.
        key: Its idempotency key; empty without one.
        about: What the answer says of what it brought, where its format has that.
        since: When it came.
        until: When its results expire; None while there is none.
        results: Of each scorer; None while they are not all there.
        seconds: From its coming to its results.
        finished: Set once they are.
    """

    ticket: str
    digest: str
    key: str
    since: float
    about: Mapping[str, JSON]
    until: float | None = None
    results: Results | None = None
    seconds: float = 0.0
    finished: asyncio.Event = attrs.field(factory=asyncio.Event)


class Ledger:
    """The requests of a service.

    Args:
        keep_s: Seconds that a result is kept.
        keep: Most results that are kept; of more, the oldest expire.
        forget_s: Seconds after that until a request is not known any more.
    """

    def __init__(self, *, keep_s: float, keep: int, forget_s: float) -> None:
        self._keep_s: Final = keep_s
        self._keep: Final = keep
        self._forget_s: Final = forget_s
        self._pending: Final[dict[str, Entry]] = {}
        self._done: Final[OrderedDict[str, Entry]] = OrderedDict()
        self._expired: Final[OrderedDict[str, float]] = OrderedDict()
        self._keys: Final[dict[str, Entry]] = {}

    @property
    def num_pending(self) -> int:
        """Requests without a result."""
        return len(self._pending)

    @property
    def num_done(self) -> int:
        """Results that are kept."""
        return len(self._done)

    def known(self, key: str, now: float) -> Entry | None:
        """The request that came with this idempotency key; None if there was none or its result has expired."""
        self._sweep(now)
        return self._keys.get(key) if key else None

    def open(self, ticket: str, *, digest: str, key: str, about: Mapping[str, JSON], now: float) -> Entry:
        """A new request, whose ticket and key are not known."""
        entry = Entry(ticket=ticket, digest=digest, key=key, since=now, about=about)
        assert ticket not in self._pending
        assert not (key and key in self._keys)
        self._pending[ticket] = entry
        if key:
            self._keys[key] = entry
        return entry

    def finish(self, entry: Entry, results: Results, now: float) -> None:
        """A request has its results."""
        del self._pending[entry.ticket]
        entry.results, entry.until, entry.seconds = results, now + self._keep_s, now - entry.since
        self._done[entry.ticket] = entry
        entry.finished.set()
        self._sweep(now)

    def find(self, ticket: str, now: float) -> tuple[State, Entry | None]:
        """The state of a request, with its entry."""
        self._sweep(now)
        entry = self._pending.get(ticket)
        if entry is not None:
            return "pending", entry
        entry = self._done.get(ticket)
        if entry is not None:
            return "done", entry
        return ("expired" if ticket in self._expired else "unknown"), None

    def _sweep(self, now: float) -> None:
        # Both are in the order of time: entries are added with the same delay each.
        while self._done:
            entry = next(iter(self._done.values()))
            assert entry.until is not None
            if entry.until > now and len(self._done) <= self._keep:
                break
            del self._done[entry.ticket]
            self._keys.pop(entry.key, None)
            self._expired[entry.ticket] = now + self._forget_s
        while self._expired and next(iter(self._expired.values())) <= now:
            self._expired.popitem(last=False)
