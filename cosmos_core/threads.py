"""Calls on threads of their own, for which no process waits that ends: they may hang, and are left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
