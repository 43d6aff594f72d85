"""A pool of worker processes: one thread serves all of them, and replaces those that hang or die."""

from __future__ import annotations

import abc
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from cosmos_core.errors import ReplicaError, TransportError
from cosmos_core.rollout.workers.process import WorkerProcess
from cosmos_core.threads import SupervisedThread

W = TypeVar("W", bound=WorkerProcess)
_LOG: Final = logging.getLogger(__name__)


class WorkerPool(abc.ABC, Generic[W]):
    """Worker processes, called `worker` with its article in messages, and the thread that serves them."""

    def __init__(self, *, thread: str, worker: str, num_workers: int) -> None:
        self._worker_name: Final = worker
        self._num_workers: Final = num_workers
        self._selector: Final = selectors.DefaultSelector()
        self._wake: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._commands: Final[deque[Callable[[], None]]] = deque()
        self._workers: Final[list[W]] = []
        self._thread: Final = SupervisedThread(thread, self._run)
        self._lock: Final = threading.Lock()
        self._places: Final[set[str]] = set()
        self._closing = False

    def start(self) -> None:
        """Start the workers; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """End the workers; nothing more is answered. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._selector.close()
        os.close(self._wake)

    def check(self) -> None:
        """Return if the pool can work.

        Raises:
            PluginError: The workers' plugins cannot be loaded.
            ReplicaError: The pool failed.
        """
        self._thread.check()

    def _submit(self, command: Callable[[], None]) -> None:
        """Have the thread do something, unless the pool is closed."""
        with self._lock:
            if not self._closing:
                self._commands.append(command)
                os.eventfd_write(self._wake, 1)

    # -- the pool's thread --------------------------------------------------------------------------------------------

    def _log_raised(self, what: str, place: str, trace: str) -> None:
        """Log where a plugin raised, each place once; nothing where there is no place."""
        if place and place not in self._places:
            self._places.add(place)
            _LOG.warning("%s raised at %s:\n%s", what, place, trace)

    @abc.abstractmethod
    def _make(self) -> W:
        """Start a worker."""

    @abc.abstractmethod
    def _read(self, worker: W) -> None:
        """Take what a worker has sent."""

    @abc.abstractmethod
    def _settle(self, worker: W, how: str, *, is_late: bool) -> None:
        """Settle what a worker was working on that hung (`is_late`) or has ended; `how` or why, in words."""

    def _end(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.end()

    def _dispatch(self) -> None:
        """Give workers what waits."""

    def _run(self) -> None:
        try:
            self._selector.register(self._wake, selectors.EVENT_READ)
            for _ in range(self._num_workers):
                self._spawn()
            while not self._closing:
                self._turn()
        finally:
            self._end()

    def _turn(self) -> None:
        now = time.monotonic()
        deadline = min((worker.deadline() for worker in self._workers), default=float("inf"))
        wait_s = None if deadline == float("inf") else max(0.0, deadline - now)
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                os.eventfd_read(self._wake)
            else:
                self._serve(key.data)
        # Late is who was late before that look: what came while this thread was away, or served others, is in time.
        for worker in [each for each in self._workers if each.deadline() <= now]:
            self._replace(worker, is_late=True)
        while self._commands:
            self._commands.popleft()()
        self._dispatch()
        for worker in self._workers:
            if worker.wants_write:
                worker.send()
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.wants_write else 0)
            if self._selector.get_key(worker.socket).events != events:
                self._selector.modify(worker.socket, events, worker)

    def _spawn(self) -> None:
        worker = self._make()
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def _replace(self, worker: W, *, is_late: bool, fault: str = "") -> None:
        """Start another worker for one that hangs, has ended, or has a `fault` for which it is ended."""
        self._selector.unregister(worker.socket)
        self._workers.remove(worker)
        # Its socket closes a moment before its exit code is known.
        ended = worker.end(0.0 if is_late or fault else 1.0)
        how = fault or ended
        if not worker.is_ready:
            raise ReplicaError(f"{self._worker_name} did not start: {how}; its output is in this replica's output")
        self._spawn()
        self._settle(worker, how, is_late=is_late)

    def _serve(self, worker: W) -> None:
        try:
            self._read(worker)
        except EOFError:
            self._replace(worker, is_late=False)
        except TransportError as error:
            self._replace(worker, is_late=False, fault=f"it sent what cannot be read: {error}")
