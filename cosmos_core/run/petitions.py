"""What is asked of the controller until it has answered, which may take until it is back."""

from __future__ import annotations

import secrets
from typing import Final

from cosmos_core.run.following.observer import Observer
from cosmos_core.transport.requests import Request

_AGAIN_S: Final = 1.0


class Petitions:
    """Requests without an answer, each with a name of its own, under which it is carried out once."""

    def __init__(self) -> None:
        self._pending: Final[dict[str, Request]] = {}
        self._sent_at = float("-inf")

    def add(self, request: Request) -> str:
        """Ask for something from now on; the name under which it will be answered (`Observer.answers`)."""
        ident = secrets.token_hex(8)
        self._pending[ident] = request
        self._sent_at = float("-inf")
        return ident

    def send(self, observer: Observer, now: float) -> None:
        """Send what has not been answered, when it is time.

        Args:
            observer: The line to the controller.
            now: Seconds of any monotonic clock.
        """
        for ident in self._pending.keys() & observer.answers.keys():
            del self._pending[ident]
        if self._pending and now - self._sent_at > _AGAIN_S:
            self._sent_at = now
            for ident, request in self._pending.items():
                observer.ask(request, ident)
