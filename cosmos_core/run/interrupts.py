"""Counts Ctrl-C and requests to end, for those who see to the end of their processes themselves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_WATCHED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Counts them in `number` while `counted` lasts."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count signals instead of dying of them; to be called on the main thread."""

        def count(_number: int, _frame: FrameType | None) -> None:
            self.number += 1

        earlier = [(number, signal.signal(number, count)) for number in _WATCHED if not _is_let_pass(number)]
        try:
            yield
        finally:
            for number, handler in earlier:
                signal.signal(number, handler)


def _is_let_pass(number: signal.Signals) -> bool:
    """True if it was started to outlive its terminal, as by `nohup`."""
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
