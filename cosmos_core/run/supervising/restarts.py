"""What becomes of a run when one of its processes ends: whose failure it is, and whether another may take its place.

A process that was killed says nothing of the run: another one does its work. An error that a replica reports would
come again, and is the run's. One that the controller refuses would be refused again: the run does without it.
"""

from __future__ import annotations

import signal
from collections import deque
from typing import Final, Literal, TypeAlias

from cosmos_core.replica.exits import LOST, REFUSED
from cosmos_core.run.launch import Exit

WINDOW_S: Final = 600.0
"""How long a start counts among those that `launch.restarts` allows."""

Cause: TypeAlias = Literal["killed", "left", "refused", "failed"]
"""`killed`: by a signal, or with its work in other hands; `left`: it said that it was done; `refused`: the controller
does not want it, nor another one in its place; `failed`: by an error."""

_OUTSIDE: Final = frozenset({LOST, 128 + signal.SIGTERM, 128 + signal.SIGKILL, 128 + signal.SIGINT})
"""Exit codes of processes that were ended from outside: as replicas say it themselves, and as shells do."""


def cause_of(ended: Exit) -> Cause:
    """Why a process ended, by its exit code."""
    if ended.code < 0 or ended.code in _OUTSIDE:
        return "killed"
    if ended.code == REFUSED:
        return "refused"
    return "failed" if ended.code else "left"


def last_words(ended: Exit) -> str:
    """How a process ended, with the error that it logged last if it did."""
    how = f"killed by signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
    return f"{ended.error} ({how})" if ended.error else how


class Restarts:
    """Counts how often each replica was started again.

    Args:
        most: Times in `WINDOW_S` that one may be.
    """

    def __init__(self, most: int) -> None:
        self._most: Final = most
        self._times: Final[dict[str, deque[float]]] = {}

    def take(self, name: str, now: float) -> bool:
        """Whether a replica may be started once more; if so, it is counted.

        Args:
            name: The replica's, or the controller's.
            now: Seconds of any monotonic clock.
        """
        times = self._times.setdefault(name, deque())
        while times and now - times[0] > WINDOW_S:
            times.popleft()
        if len(times) >= self._most:
            return False
        times.append(now)
        return True
