"""A thread whose failure its owner learns of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from cosmos_core.errors import ReplicaError


class SupervisedThread:
    """Runs `target` once; what it raises is logged by `threading.excepthook` and raised again by `check`."""

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        self._target = target
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start it."""
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def check(self) -> None:
        """Raise ReplicaError if it failed."""
        if self._error is not None:
            raise ReplicaError(f"the {self._thread.name} thread failed: {self._error}") from self._error

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._error = sys.exception()
