"""A network that loses, repeats, delays and reorders, and whose links can be cut."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Final

from cosmos_core.transport.messages import DOWN, REQUEST, UP, Answer, Command, Request
from tests.simulation.simulator.faults import Faults
from tests.simulation.simulator.trace import Trace

Action = Callable[[], None]


class Agenda:
    """Actions by the time at which they happen; those of one time in the order in which they were noted.

    Attributes:
        now: The present time in seconds.
        num_done: Actions so far.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._noted = 0
        self._heap: Final[list[tuple[float, int, Action]]] = []

    def after(self, seconds: float, action: Action) -> None:
        """Note what happens in so many seconds."""
        self._noted += 1
        heapq.heappush(self._heap, (self.now + seconds, self._noted, action))

    def proceed(self) -> None:
        """Let time pass until the next action, and do it."""
        self.now, _, action = heapq.heappop(self._heap)
        self.num_done += 1
        action()


_ALIKE_S: Final = 0.02
_LATE: Final = 1 / 3


class Network:
    """Links between the controller and each other process, by that one's name.

    Attributes:
        faults: What goes wrong; the owner changes it when faults cease.
        num_lost: Messages that did not arrive.
        num_repeated: Those that arrived twice.
    """

    def __init__(self, agenda: Agenda, rng: random.Random, faults: Faults) -> None:
        self.faults = faults
        self.num_lost = 0
        self.num_repeated = 0
        self._agenda: Final = agenda
        self._rng: Final = rng
        self._cut_until: Final[dict[str, float]] = {}
        self._num_outages = 0

    def cut(self, link: str, seconds: float) -> None:
        """Nothing is carried for so long; what is under way arrives."""
        self._cut_until[link] = self._agenda.now + seconds

    def mend(self) -> None:
        """All links carry again."""
        self._cut_until.clear()

    def forget(self) -> None:
        """What is under way never arrives, as all who sent it have ended long ago."""
        self._num_outages += 1

    def is_cut(self, link: str) -> bool:
        """Whether a link carries nothing now."""
        return self._cut_until.get(link, 0.0) > self._agenda.now

    def deliver_late(self, seconds: float, deliver: Callable[[], None]) -> None:
        """Something was under way for long, and arrives in so many seconds."""
        outages = self._num_outages
        self._agenda.after(seconds, lambda: deliver() if outages == self._num_outages else None)

    def carry(self, link: str, data: bytes, deliver: Callable[[bytes], None], *, after: float = 0.0) -> None:
        """Take a message along, which leaves `after` so many seconds."""
        if self.is_cut(link) or self._rng.random() < self.faults.loss:
            self.num_lost += 1
            return
        number = 2 if self._rng.random() < self.faults.repeat else 1
        self.num_repeated += number - 1
        outages = self._num_outages

        def arrive() -> None:
            if outages == self._num_outages:
                deliver(data)

        for _ in range(number):
            longest = self.faults.delay_s if self._rng.random() < _LATE else _ALIKE_S
            self._agenda.after(after + self._rng.random() * longest, arrive)


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
