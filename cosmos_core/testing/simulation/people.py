"""People in a simulation: they ask for something until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cosmos_core.testing.simulation.agenda import Agenda
from cosmos_core.testing.simulation.trace import Trace
from cosmos_core.transport.messages import Answer, Command
from cosmos_core.transport.requests import Request
from cosmos_core.transport.wire import DOWN, REQUEST, UP

_REPEAT_S: Final = 0.7


class Person:
    """Somebody with one request.

    Args:
        name: Names the request.
        request: What is asked for.
        agenda: Simulated time.
        trace: Where what happened is kept.
        say: Carries a message to the controller.

    Attributes:
        request: As given.
        answer: What the controller said; None before that.
    """

    def __init__(
        self, name: str, request: Request, *, agenda: Agenda, trace: Trace, say: Callable[[bytes, bytes], None]
    ) -> None:
        self.request: Final = request
        self.answer: Answer | None = None
        self.name: Final = name
        self._agenda: Final = agenda
        self._trace: Final = trace
        self._say: Final = say
        self._command: Final = Command(run_id="run", ident=self.name, request=REQUEST.encode(request))
        self._ask()

    def hear(self, data: bytes) -> None:
        """An answer arrives."""
        message = DOWN.decode(data)
        if isinstance(message, Answer) and message.ident == self._command.ident and self.answer is None:
            self._trace.note(self._agenda.now, self.name, message)
            self.answer = message

    def give_up(self) -> None:
        """Wait for no answer any more."""
        if self.answer is None:
            self.answer = Answer(ident=self.name, refusal="nobody answered")

    def _ask(self) -> None:
        if self.answer is None:
            self._trace.note(self._agenda.now, self.name, self._command)
            self._say(f"{self.name}|".encode(), UP.encode(self._command))
            self._agenda.after(_REPEAT_S, self._ask)
