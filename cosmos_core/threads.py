"""Calls on daemon threads: one that hangs is left behind, and does not keep its process from ending."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from cosmos_core.errors import CosmosError, ReplicaError

P = ParamSpec("P")
T = TypeVar("T")


def awaitable(call: Callable[P, T]) -> Callable[P, T]:
    """The call with StopIteration as a RuntimeError: a future of asyncio refuses it, and would never be done."""

    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError("the call raised StopIteration").with_traceback(error.__traceback__) from error

    return called


def begin(call: Callable[[], T], name: str) -> Future[T]:
    """Call on a daemon thread of this name; the future has what it returns or raises, be it SystemExit."""
    ended: Future[T] = Future()
    # Whoever gives the call up does not end it, and it may still end.
    ended.set_running_or_notify_cancel()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is asked for
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended


class SupervisedThread:
    """Runs `target` once. What it raises is raised again by `check`; what is no CosmosError is logged besides."""

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._target = target
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for its end, if it was started."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Return if it did not fail.

        Raises:
            CosmosError: What it raised, or ReplicaError for any other error.
        """
        if isinstance(self._error, CosmosError):
            raise type(self._error)(str(self._error)) from self._error
        if self._error is not None:
            raise ReplicaError(f"the {self._thread.name} thread failed: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            self._target()
        except CosmosError as error:
            self._error = error
        finally:
            # Anything else goes on to threading.excepthook, which logs it.
            self._error = self._error or sys.exception()
