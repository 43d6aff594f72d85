"""A reader-writer lock of the loaded weights: evaluations never see them change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

_LOOK_S: Final = 0.1


class VersionLock:
    """Evaluations enter while exactly their version is loaded; an update waits until they have left."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.loaded = -1
        """Newest version whose digest was confirmed; -1 before the first."""
        self._evaluating = 0
        self._evaluated = -1
        self._is_changing = False
        self._closed = False

    def enter(self, version: int) -> bool:
        """Begin an evaluation at `version`, if that is what is loaded."""
        with self._changed:
            if self._is_changing or self.loaded != version:
                return False
            self._evaluating += 1
            self._evaluated = version
            return True

    def leave(self) -> None:
        """End an evaluation."""
        with self._changed:
            self._evaluating -= 1
            self._changed.notify_all()

    @contextlib.contextmanager
    def changing(self, version: int, interrupted: Callable[[], bool] = lambda: False) -> Iterator[bool]:
        """Wait for evaluations to end and keep new ones out; yields False if that was interrupted, or this was closed.

        Those of `version` itself go on: an engine that slept loads again what it had.
        """
        with self._changed:
            while self._evaluating and version != self._evaluated and not (self._closed or interrupted()):
                self._changed.wait(_LOOK_S)
            self._is_changing = not (self._closed or interrupted())
        try:
            yield self._is_changing
        finally:
            with self._changed:
                self._is_changing = False

    def confirm(self, version: int) -> None:
        """`version` is loaded and attested."""
        with self._changed:
            self.loaded = version

    def revoke(self) -> None:
        """Take back that any version is loaded."""
        self.confirm(-1)

    def close(self) -> None:
        """Let nothing wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
