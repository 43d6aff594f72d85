"""A journal of which somebody is told each event that goes into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cosmos_core.control.book import Durable
from cosmos_core.control.machine.events import Event


class Noted:
    """A journal, and who is told.

    Args:
        journal: Where events are kept.
        note: Told of each event, once the state has taken it in.
    """

    def __init__(self, journal: Durable, note: Callable[[Event], None]) -> None:
        self._journal: Final = journal
        self._note: Final = note

    def append(self, event: Event) -> int:
        """Add an event to what the next commit makes durable."""
        self._note(event)
        return self._journal.append(event)

    def commit(self) -> int:
        """Make everything appended durable."""
        return self._journal.commit()
