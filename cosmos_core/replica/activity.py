"""The activity of a replica and its progress: heartbeats prove only that its process lives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

import attrs


@attrs.frozen(kw_only=True)
class Pulse:
    """A look at a replica, which goes with each heartbeat.

    Attributes:
        progress: A number that is another one after each bit of work.
        doing: What it works on, to be read after "while"; empty if it has nothing to do.
        waits: Whether it does no more than wait for other replicas, so that no progress is no fault of its own.
    """

    progress: int = 0
    doing: str = ""
    waits: bool = False


TakePulse: TypeAlias = Callable[[], Pulse]
"""Called on the control line's thread: quick, and must not raise. `Pulse` is that of who need make no progress."""


class Activity:
    """The work of one thread, seen from others. Any of them may take the pulse."""

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._pulse = Pulse()

    def advance(self) -> None:
        """Note that the work gets on."""
        with self._lock:
            self._pulse = attrs.evolve(self._pulse, progress=self._pulse.progress + 1)

    @contextlib.contextmanager
    def doing(self, what: str, *, waits: bool = False) -> Iterator[None]:
        """Work on something, to be read after "while"; within something else, it is that again afterwards."""
        before = self._pulse
        self._begin(what, waits=waits)
        try:
            yield
        finally:
            self._begin(before.doing, waits=before.waits)

    def pulse(self) -> Pulse:
        """The newest look at the work."""
        return self._pulse

    def _begin(self, what: str, *, waits: bool) -> None:
        with self._lock:
            self._pulse = Pulse(progress=self._pulse.progress + 1, doing=what, waits=waits)
