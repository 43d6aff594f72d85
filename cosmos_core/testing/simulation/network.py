"""A network that loses, repeats, delays and reorders, and whose links can be cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from cosmos_core.testing.simulation.agenda import Agenda
from cosmos_core.testing.simulation.faults import Faults

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
