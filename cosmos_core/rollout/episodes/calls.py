"""The threads behind `asyncio.to_thread` in an environment worker, and which episodes they work for.

A call that has begun cannot be cancelled: who awaits it can only cease to wait. So what goes on is remembered.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, ParamSpec, TypeVar

_MOST: Final = 4096
"""Threads, more than a worker has dialogues: one is started only where all others are busy, so that no call waits."""

_EPISODE: Final[contextvars.ContextVar[int | None]] = contextvars.ContextVar("episode", default=None)

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def of_episode(episode: int) -> Iterator[None]:
    """Within, calls and tasks that are begun are this episode's."""
    token = _EPISODE.set(episode)
    try:
        yield
    finally:
        _EPISODE.reset(token)


class Calls(ThreadPoolExecutor):
    """The default executor of a worker's event loop."""

    def __init__(self) -> None:
        super().__init__(max_workers=_MOST, thread_name_prefix="environment")
        self._guard: Final = threading.Lock()
        self._going: Final[dict[Future[Any], int | None]] = {}

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call something in a thread, for the episode of this context."""
        future: Future[T] = super().submit(fn, *args, **kwargs)
        with self._guard:
            self._going[future] = _EPISODE.get()
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[T]) -> None:
        with self._guard:
            self._going.pop(future, None)

    def of(self, episode: int) -> list[Future[Any]]:
        """The calls of an episode that go on."""
        with self._guard:
            return [future for future, whose in self._going.items() if whose == episode]

    @property
    def num_going(self) -> int:
        """Calls that go on."""
        with self._guard:
            return len(self._going)
