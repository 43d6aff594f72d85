"""Simulated time: what happens when, in an order that the seed decides alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

Action = Callable[[], None]


class Agenda:
    """Actions by the time at which they happen; those of one time in the order in which they were noted.

    Attributes:
        now: The present time in seconds.
        num_done: Actions so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._noted = 0
        self._heap: Final[list[tuple[float, int, Action]]] = []

    def after(self, seconds: float, action: Action) -> None:
        """Note what happens in so many seconds."""
        self._noted += 1
        heapq.heappush(self._heap, (self.now + seconds, self._noted, action))

    def proceed(self) -> None:
        """Let time pass until the next action, and do it."""
        self.now, _, action = heapq.heappop(self._heap)
        self.num_done += 1
        action()
