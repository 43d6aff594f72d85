"""Runs the environments of a replica in worker processes, beside generation, each answer under its time limit.

One thread serves all workers. A worker that hangs or dies is replaced. Its episodes are lost with it, for what they
were in the middle of is known to nobody else. Those that had their turn may be to blame: they have failed. The others
are told apart, as lost.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import attrs

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import TransportError
from cosmos_core.rollout.episodes.messages import (
    END_S,
    FROM_WORKER,
    STUCK_EXIT,
    TO_WORKER,
    Act,
    Began,
    Begin,
    Close,
    Failed,
    Open,
    Reply,
    Setup,
)
from cosmos_core.rollout.workers.pool import WorkerPool
from cosmos_core.rollout.workers.process import GRACE_S, WorkerProcess, frame
from cosmos_core.transport.bounds import sendable
from cosmos_core.types import Prompt

Answer: TypeAlias = Callable[[Reply], None]


@attrs.define(kw_only=True, eq=False)
class Asked:
    """A question that an episode has not answered yet; it has begun when it has its turn on the worker's event loop.

    `since` is when it had its turn, or was asked (monotonic seconds), and `timeout_s` what it may take from then on.
    An agent has its turn as long as it runs.
    """

    answer: Answer
    timeout_s: float
    is_agent: bool = False
    has_begun: bool = False
    since: float = attrs.field(factory=time.monotonic)


class EnvironmentProcess(WorkerProcess):
    """One worker.

    Attributes:
        episodes: Those that are open in it, each with what it was asked; None where it is the model's turn.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__("cosmos_core.rollout.episodes.worker", TO_WORKER.encode(setup), FROM_WORKER)
        self.episodes: Final[dict[int, Asked | None]] = {}

    def ask(self, episode: int, framed: bytes, asked: Asked) -> None:
        """Ask an episode something."""
        self.episodes[episode] = asked
        self.put(framed)

    def forget(self, episode: int) -> None:
        """Close an episode; a reply that is under way finds nobody."""
        self.episodes.pop(episode, None)
        self.put(frame(TO_WORKER.encode(Close(episode=episode))))

    def receive(self) -> Iterator[tuple[Answer, Reply]]:
        """Yield each reply with whom to tell it."""
        for message in self.messages():
            if asked := self._asked(message):
                yield asked.answer, message

    def _asked(self, message: Any) -> Asked | None:
        """The question that a reply answers; None for a `Began`, and for what was closed meanwhile."""
        asked = self.episodes.get(message.episode)
        if asked is None:
            return None
        if isinstance(message, Began):
            asked.has_begun, asked.since = True, self.heard
            return None
        self.episodes[message.episode] = None
        return asked

    def due(self) -> float:
        """When it is late, once it is ready (monotonic seconds); infinity while it owes nothing.

        Whoever has not begun waits for those that have; where none has, something else holds the worker up.
        """
        asked = [each for each in self.episodes.values() if each is not None]
        if not asked:
            return float("inf")
        begun = [each.since + each.timeout_s for each in asked if each.has_begun]
        waited = max(self.heard, min(each.since for each in asked)) + asked[0].timeout_s
        return (min(begun) if begun else waited) + GRACE_S

    def hang_up(self) -> None:
        """Say that nothing is asked any more: the worker closes its episodes, and ends."""
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_WR)


_LOG: Final = logging.getLogger(__name__)
_LEAVE_S: Final = 1.0
"""How long a process may take to end once its episodes are closed."""


class EnvironmentPool(WorkerPool[EnvironmentProcess]):
    """Worker processes for the environment of a recipe.

    Each `answer` is called on the pool's thread, must be quick, and is called once unless the episode is closed first.
    """

    def __init__(self, environment: EnvironmentConfig, *, seed: int) -> None:
        super().__init__(thread="environments", worker="an environment worker", num_workers=environment.workers)
        self._config: Final = environment
        self._setup: Final = Setup(environment=environment, seed=seed)
        self._homes: Final[dict[int, EnvironmentProcess]] = {}
        self._waiting: Final[deque[tuple[int, bytes, Answer]]] = deque()
        self._numbers: Final = itertools.count()

    def open(self, prompt: Prompt, seed: int, answer: Answer) -> int:
        """Begin an episode: it answers `Opened` or `Failed`. Its number is how it is called from then on."""
        episode = next(self._numbers)
        self._submit(lambda: self._open(Open(episode=episode, prompt=prompt, seed=seed), answer))
        return episode

    def begin(self, begin: Begin, answer: Answer) -> int:
        """Begin an agent, when one more may run: it answers `Ended` or `Failed`. The number of `begin` is set here."""
        episode = next(self._numbers)
        self._submit(lambda: self._open(attrs.evolve(begin, episode=episode), answer))
        return episode

    def act(self, episode: int, text: str, answer: Answer) -> None:
        """Give an episode the model's turn: it answers `Answered` or `Failed`."""
        self._submit(lambda: self._act(episode, text, answer))

    def forget(self, episode: int) -> None:
        """Close an episode, whatever it is doing."""
        self._submit(lambda: self._forget(episode))

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _make(self) -> EnvironmentProcess:
        return EnvironmentProcess(self._setup)

    def _end(self) -> None:
        """Let the workers close their episodes, and kill those that take too long; one that starts has none."""
        until = time.monotonic() + END_S + _LEAVE_S
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end(max(0.0, until - time.monotonic()) if worker.is_ready else 0.0)

    def _read(self, worker: EnvironmentProcess) -> None:
        for answer, reply in worker.receive():
            if isinstance(reply, Failed):
                self._log_raised(f"environment {self._config.label}", reply.place, reply.trace)
            answer(reply)

    def _settle(self, worker: EnvironmentProcess, how: str, *, is_late: bool) -> None:
        _LOG.warning("an environment worker with %d episodes is replaced: %s", len(worker.episodes), how)
        is_stuck = how == f"exit code {STUCK_EXIT}"
        begun = [each for each in worker.episodes.values() if each is not None and each.has_begun]
        now = time.monotonic()
        for episode, asked in worker.episodes.items():
            if asked is None:
                continue  # it is told when it is asked next
            # Where none has begun, what held the worker up was none of those that waited.
            is_suspect = asked.has_begun or (is_late and not begun)
            if asked.has_begun and asked.is_agent:
                # An agent has its turn all along: it is late by its own time, and one of many ended the process.
                is_suspect = asked.since + asked.timeout_s <= now if is_late else len(begun) == 1
            is_suspect = is_suspect and not is_stuck
            asked.answer(self._failed(episode, asked, how, is_late=is_late) if is_suspect else _lost(episode, how))

    def _failed(self, episode: int, asked: Asked, how: str, *, is_late: bool) -> Failed:
        late = f"no answer within {asked.timeout_s:g} s"
        detail = late if is_late else f"the process of this episode ended while it had its turn ({how})"
        return Failed(episode=episode, timed_out=is_late, detail=detail)

    def _open(self, question: Open | Begin, answer: Answer) -> None:
        episode = question.episode
        try:
            framed = frame(TO_WORKER.encode(question))
        except (TypeError, ValueError, OverflowError, TransportError) as error:
            detail = f"the row cannot be sent to an environment worker: {error}"
            answer(Failed(episode=episode, timed_out=False, detail=detail))
            return
        if isinstance(question, Begin):
            self._waiting.append((episode, framed, answer))
        else:
            self._put(episode, framed, Asked(answer=answer, timeout_s=self._config.timeout_s))

    def _put(self, episode: int, framed: bytes, asked: Asked) -> None:
        worker = min(self._workers, key=lambda each: len(each.episodes))
        self._homes[episode] = worker
        worker.ask(episode, framed, asked)

    def _dispatch(self) -> None:
        """Begin agents that wait, as many as may run at once."""
        agent = self._config.agent
        while self._waiting and min(len(each.episodes) for each in self._workers) < agent.concurrency:
            episode, framed, answer = self._waiting.popleft()
            self._put(episode, framed, Asked(answer=answer, timeout_s=agent.timeout_s, is_agent=True))

    def _act(self, episode: int, text: str, answer: Answer) -> None:
        worker = self._homes.get(episode)
        if worker is None or worker not in self._workers:
            answer(_lost(episode))
            return
        asked = Asked(answer=answer, timeout_s=self._config.timeout_s)
        worker.ask(episode, frame(TO_WORKER.encode(Act(episode=episode, text=sendable(text)))), asked)

    def _forget(self, episode: int) -> None:
        worker = self._homes.pop(episode, None)
        if worker is None and (waits := next((each for each in self._waiting if each[0] == episode), None)):
            self._waiting.remove(waits)
        if worker is not None and worker in self._workers:
            worker.forget(episode)


def _lost(episode: int, how: str = "") -> Failed:
    if how == f"exit code {STUCK_EXIT}":
        how = "too many others went on after they were closed"
    detail = f"lost with its process, which ended because of other episodes{f' ({how})' if how else ''}"
    return Failed(episode=episode, timed_out=False, detail=detail, is_lost=True)
