"""The replica's side of one environment worker: its episodes, and what each was asked since when."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import attrs

from cosmos_core.rollout.episodes.wire import FROM_WORKER, TO_WORKER, Began, Broken, Close, Ready, Reply, Setup
from cosmos_core.rollout.workers.frames import frame
from cosmos_core.rollout.workers.line import WorkerLine

_START_S: Final = 120.0
_GRACE_S: Final = 1.0
"""How much later than the worker's own time limit of a coroutine the replica takes action."""

Answer: TypeAlias = Callable[[Reply], None]


@attrs.define(kw_only=True, eq=False)
class Asked:
    """What an episode waits for.

    Attributes:
        answer: Told the reply.
        has_begun: Whether it has its turn on the worker's event loop.
        since: When it had it, or was asked (monotonic seconds).
    """

    answer: Answer
    has_begun: bool = False
    since: float = attrs.field(factory=time.monotonic)


class EnvironmentProcess:
    """One worker. All methods are called on the pool's thread.

    Attributes:
        episodes: Those that are open in it, each with what it was asked; None where it is the model's turn.
        is_ready: Whether it has loaded the environment.
    """

    def __init__(self, setup: Setup) -> None:
        self._line: Final = WorkerLine("cosmos_core.rollout.episodes.worker", TO_WORKER.encode(setup))
        self._timeout_s: Final = setup.timeout_s
        self._heard = time.monotonic()
        self.socket: Final = self._line.socket
        self.episodes: Final[dict[int, Asked | None]] = {}
        self.is_ready = False

    @property
    def wants_write(self) -> bool:
        """Whether something waits to be sent."""
        return self._line.wants_write

    def send(self) -> None:
        """Send what the socket takes now."""
        self._line.send()

    def ask(self, episode: int, framed: bytes, answer: Answer) -> None:
        """Ask an episode something."""
        self.episodes[episode] = Asked(answer=answer)
        self._line.put(framed)

    def forget(self, episode: int) -> None:
        """Close an episode; a reply that is under way finds nobody."""
        self.episodes.pop(episode, None)
        self._line.put(frame(TO_WORKER.encode(Close(episode=episode))))

    def receive(self) -> Iterator[tuple[Answer, Reply] | Broken]:
        """Yield each reply with whom to tell it.

        Raises:
            EOFError: The worker has ended.
            TransportError: What it sent cannot be read.
        """
        for message in map(FROM_WORKER.decode, self._line.receive()):
            self._heard = time.monotonic()
            if isinstance(message, Ready):
                self.is_ready = True
            elif isinstance(message, Broken):
                yield message
            elif asked := self._asked(message):
                yield asked.answer, message

    def _asked(self, message: Any) -> Asked | None:
        """What a reply settles; None for a `Began`, and for what was closed meanwhile."""
        asked = self.episodes.get(message.episode)
        if asked is None:
            return None
        if isinstance(message, Began):
            asked.has_begun, asked.since = True, self._heard
            return None
        self.episodes[message.episode] = None
        return asked

    def deadline(self) -> float:
        """When it is overdue (monotonic seconds); infinity while it owes nothing.

        Whoever has not begun waits for those that have; where none has, something else holds the worker up.
        """
        asked = [each for each in self.episodes.values() if each is not None]
        if not self.is_ready:
            return self._heard + _START_S
        if not asked:
            return float("inf")
        begun = [each.since for each in asked if each.has_begun]
        since = min(begun) if begun else max(self._heard, min(each.since for each in asked))
        return since + self._timeout_s + _GRACE_S

    def hang_up(self) -> None:
        """Say that nothing is asked any more: the worker closes its episodes, and ends."""
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_WR)

    def end(self, grace_s: float = 0.0) -> str:
        """End it, by force unless it has ended or does so within `grace_s`; how it ended, in words."""
        return self._line.end(grace_s)
