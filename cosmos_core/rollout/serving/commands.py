"""The engine thread's queue: commands run between two steps, and an idle thread sleeps on it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from cosmos_core.errors import CosmosError, EngineError, EngineLostError

T = TypeVar("T")


class LostProcessError(RuntimeError):
    """A process that the engine needs is of no use any more.

    No `CosmosError`: that would fail a command, and it is the engine's thread that has to fail.

    Args:
        reason: What others are told: `EngineLostError`, unless that process has failed by an error of its own.
    """

    def __init__(self, reason: EngineError) -> None:
        super().__init__(str(reason))
        self.reason: Final = reason


class Commands:
    """Commands for one thread; closed for good when that thread ends."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.closed: EngineError | None = EngineError("the engine is not started")
        """The error with which commands are refused; None while they are not."""
        self._thread: int | None = None

    def open(self) -> None:
        """Accept commands, to be run by the calling thread."""
        with self._lock:
            self.closed = None
            self._thread = threading.get_ident()

    def close(self, reason: EngineError) -> None:
        """Refuse commands from now on, and those that wait."""
        with self._lock:
            self.closed = reason
        while not self._queue.empty():
            self._queue.get()[1].set_exception(reason)

    def post(self, command: Callable[[], T]) -> Future[T]:
        """Queue a command; its future holds the result or the `CosmosError` that it raised.

        Any other error ends the thread, and the future holds it in an EngineError.

        On the thread itself it runs at once, so that callbacks may use the engine.

        Raises:
            EngineError: The thread is not there (any more).
        """
        future: Future[T] = Future()
        with self._lock:
            if self.closed is not None:
                raise type(self.closed)(str(self.closed)) from self.closed
            if threading.get_ident() != self._thread:
                self._queue.put((command, future))
                return future
        _run(command, future)
        return future

    def call(self, command: Callable[[], T]) -> T:
        """Queue a command and wait for its result."""
        return self.post(command).result()

    def drain(self, *, wait: bool) -> None:
        """Run what is queued; with `wait`, sleep until there is something."""
        if wait:
            _run(*self._queue.get())
        while not self._queue.empty():
            _run(*self._queue.get())


def broken(error: BaseException) -> EngineError:
    """The error that others get of one that ended the engine's thread: `EngineLostError` if that was a lost process."""
    told = error.reason if isinstance(error, LostProcessError) else error
    kind = EngineLostError if isinstance(told, EngineLostError) else EngineError
    failure = kind(f"the engine's thread failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _run(command: Callable[[], Any], future: Future[Any]) -> None:
    try:
        result = command()
    except CosmosError as error:
        future.set_exception(error)
    except BaseException as error:
        # It is the engine that broke: the caller hears of it, and so does the thread.
        future.set_exception(broken(error))
        raise
    else:
        future.set_result(result)
