"""A thread whose failure its owner learns of."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from cosmos_core.errors import CosmosError, ReplicaError


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
