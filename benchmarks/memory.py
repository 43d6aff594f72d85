"""How much private memory a piece of work takes at its peak: bytes of this process that no file backs."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TICK_S = 0.002


class Memory:
    """The most private memory of this process while watched, above that of the start.

    Attributes:
        peak: In bytes.
    """

    def __init__(self) -> None:
        self.peak = 0

    @contextmanager
    def watched(self, *, trimmed: bool = True) -> Iterator[None]:
        """Sample while a body runs.

        Args:
            trimmed: Give back first what earlier work has freed, so that nothing is there to be had for nothing.
        """
        if trimmed:
            ctypes.CDLL(None).malloc_trim(0)
        start, over = _private(), threading.Event()

        def sample() -> None:
            while not over.wait(_TICK_S):
                self.peak = max(self.peak, _private() - start)

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            self.peak = max(self.peak, _private() - start)
            over.set()
            thread.join()


def _private() -> int:
    resident, shared = Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
