"""Signals that ask a command or a run to stop: none is lost, whatever they find a process at."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

WATCHED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What a terminal, `timeout` or a scheduler sends to a whole group of processes: one of them answers it."""


@contextmanager
def insistent(kind: type[BaseException] = KeyboardInterrupt, number: int = signal.SIGINT) -> Iterator[None]:
    """Send a signal again if Python has ignored the `kind` that its handler raised.

    It ignores whatever is raised in a destructor or in a callback, of which each import has some. Before Python 3.12 it
    makes a RuntimeError of what is raised where a class names its attributes: the `kind` is raised for it.
    """
    earlier = sys.unraisablehook

    def again(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, kind):
            # Not `threading`: this may be in the middle of it.
            _thread.start_new_thread(_send, (number,))
        else:
            earlier(ignored)

    sys.unraisablehook = again
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, kind):
            raise error.__cause__ from None
        raise
    finally:
        sys.unraisablehook = earlier


def _send(number: int) -> None:
    time.sleep(0.01)
    os.kill(os.getpid(), number)


class Interrupts:
    """Counts them in `number` while `counted` lasts."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count signals instead of dying of them; to be called on the main thread."""

        def count(*_: object) -> None:
            self.number += 1

        # `nohup` starts what shall outlive its terminal.
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        earlier = [(each, signal.signal(each, count)) for each in WATCHED if not (is_kept and each is signal.SIGHUP)]
        try:
            yield
        finally:
            for number, handler in earlier:
                signal.signal(number, handler)
