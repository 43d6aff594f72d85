"""Runs the environments of a replica in worker processes, beside generation, each answer under its time limit.

One thread serves all workers. A worker that hangs or dies is replaced. Its episodes are lost with it, for what they
were in the middle of is known to nobody else: each ends as failed, and says why.
"""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from cosmos_core.config.schema import EnvironmentConfig
from cosmos_core.errors import PluginError, ReplicaError, TransportError
from cosmos_core.rollout.environment_process import Answer, EnvironmentProcess
from cosmos_core.rollout.environment_wire import END_S, TO_WORKER, Act, Broken, Failed, Open, Setup
from cosmos_core.rollout.frames import frame
from cosmos_core.rollout.supervised import SupervisedThread
from cosmos_core.types import Prompt

_LOG: Final = logging.getLogger(__name__)
_LEAVE_S: Final = 1.0
"""How long a process may take to end once its episodes are closed."""


class EnvironmentPool:
    """Worker processes for the environment of a recipe.

    Each `answer` is called on the pool's thread, must be quick, and is called once unless the episode is closed first.

    Args:
        environment: The recipe's environment.
        seed: `run.seed`.
    """

    def __init__(self, environment: EnvironmentConfig, *, seed: int) -> None:
        self._config: Final = environment
        self._setup: Final = Setup(
            plugin=environment.plugin,
            options=dict(environment.options),
            timeout_s=environment.timeout_s,
            seed=seed,
        )
        self._selector: Final = selectors.DefaultSelector()
        self._wake: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._commands: Final[deque[Callable[[], None]]] = deque()
        self._workers: Final[list[EnvironmentProcess]] = []
        self._homes: Final[dict[int, EnvironmentProcess]] = {}
        self._numbers: Final = itertools.count()
        self._thread: Final = SupervisedThread("environments", self._run)
        self._lock: Final = threading.Lock()
        self._closing = False

    def start(self) -> None:
        """Start the workers; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Close all episodes, for some seconds at most, and end the workers; nothing more is answered. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def check(self) -> None:
        """Return if environments can run.

        Raises:
            PluginError: The environment cannot be loaded.
            ReplicaError: The pool failed.
        """
        self._thread.check()

    def open(self, prompt: Prompt, seed: int, answer: Answer) -> int:
        """Begin an episode: it answers `Opened` or `Failed`. Its number is how it is called from then on."""
        episode = next(self._numbers)
        self._submit(lambda: self._open(episode, prompt, seed, answer))
        return episode

    def act(self, episode: int, text: str, answer: Answer) -> None:
        """Give an episode the model's turn: it answers `Answered` or `Failed`."""
        self._submit(lambda: self._act(episode, text, answer))

    def forget(self, episode: int) -> None:
        """Close an episode, whatever it is doing."""
        self._submit(lambda: self._forget(episode))

    def _submit(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._closing:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._selector.register(self._wake, selectors.EVENT_READ)
            for _ in range(self._config.workers):
                self._spawn()
            while not self._closing:
                self._turn()
        finally:
            self._end()

    def _end(self) -> None:
        """Let the workers close their episodes, and kill those that take too long; one that starts has none."""
        until = time.monotonic() + END_S + _LEAVE_S
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.end(max(0.0, until - time.monotonic()) if worker.is_ready else 0.0)

    def _turn(self) -> None:
        deadline = min(worker.deadline() for worker in self._workers)
        wait_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                os.eventfd_read(self._wake)
            else:
                self._serve(key.data)
        now = time.monotonic()
        for worker in [each for each in self._workers if each.deadline() <= now]:
            self._replace(worker, is_late=True)
        while self._commands:
            self._commands.popleft()()
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.wants_write else 0)
            if self._selector.get_key(worker.socket).events != events:
                self._selector.modify(worker.socket, events, worker)

    def _spawn(self) -> None:
        worker = EnvironmentProcess(self._setup)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _serve(self, worker: EnvironmentProcess) -> None:
        if worker.wants_write:
            worker.send()
        try:
            for message in worker.receive():
                if isinstance(message, Broken):
                    raise PluginError(message.reason)
                answer, reply = message
                answer(reply)
        except EOFError:
            self._replace(worker, is_late=False)
        except TransportError as error:
            _LOG.warning("an environment worker sent what cannot be read (%s); replacing it", error)
            self._replace(worker, is_late=False)

    def _replace(self, worker: EnvironmentProcess, *, is_late: bool) -> None:
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        # Its socket closes a moment before its exit code is known.
        how = worker.end(0.0 if is_late else 1.0)
        if not worker.is_ready:
            raise ReplicaError(f"an environment worker did not start: {how}; its output is in this replica's output")
        _LOG.warning("an environment worker with %d episodes is replaced: %s", len(worker.episodes), how)
        self._spawn()
        begun = any(each is not None and each.has_begun for each in worker.episodes.values())
        for episode, asked in worker.episodes.items():
            if asked is None:
                continue  # it is told when it is asked next
            # Where none has begun, what held the worker up was none of those that waited.
            to_blame = asked.has_begun or not begun
            asked.answer(self._lost(episode, how, is_late=is_late and to_blame))

    def _lost(self, episode: int, how: str, *, is_late: bool = False) -> Failed:
        if is_late:
            detail = f"no answer within {self._config.timeout_s:g} s"
        else:
            detail = f"the process of this episode and others ended{f' ({how})' if how else ''}"
        return Failed(episode=episode, timed_out=is_late, detail=detail)

    def _open(self, episode: int, prompt: Prompt, seed: int, answer: Answer) -> None:
        try:
            framed = frame(TO_WORKER.encode(Open(episode=episode, prompt=prompt, seed=seed)))
        except (TypeError, ValueError, OverflowError, TransportError) as error:
            detail = f"the row cannot be sent to an environment worker: {error}"
            answer(Failed(episode=episode, timed_out=False, detail=detail))
            return
        worker = min(self._workers, key=lambda each: len(each.episodes))
        self._homes[episode] = worker
        worker.ask(episode, framed, answer)

    def _act(self, episode: int, text: str, answer: Answer) -> None:
        worker = self._homes.get(episode)
        if worker is None or worker not in self._workers:
            answer(self._lost(episode, ""))
            return
        # Lone surrogates, which a decoder may leave, have no place in a message.
        clean = text.encode(errors="replace").decode()
        worker.ask(episode, frame(TO_WORKER.encode(Act(episode=episode, text=clean))), answer)

    def _forget(self, episode: int) -> None:
        worker = self._homes.pop(episode, None)
        if worker is not None and worker in self._workers:
            worker.forget(episode)
