"""Calls on daemon threads: one that hangs is left behind, and does not keep its process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

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
