"""vLLM's workers: calls to each of them, and what becomes of the engine when one of their processes ends."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import multiprocessing.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any, Final, TypeVar

from cosmos_core.errors import EngineError, EngineLostError
from cosmos_engine_vllm.extension import Answer

T = TypeVar("T")

_CALL_S: Final = 300.0
"""Most seconds of a call: what can hang has ended long before."""
_LEAVE_S: Final = 5.0
_BEGIN_S: Final = 0.2
_TOLD_S: Final = 1.0


@contextlib.contextmanager
def started_apart(num_threads: int) -> Iterator[None]:
    """While a vLLM of several processes starts: these are new ones, with so many threads each.

    A fork of this process, which has threads and has computed with them, would wait for some of them for ever.
    """
    settings = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "OMP_NUM_THREADS": str(num_threads)}
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        track_apart()
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def track_apart() -> None:
    """Start Python's tracker of shared memory in a session of its own, unless one runs.

    vLLM's queues lie in files of `/dev/shm`, which it unlinks when it ends by itself. Else that tracker does, once all
    that use them are gone; who kills a replica kills its session, and would kill the tracker with it.
    """
    spawn = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _spawn_apart
    try:
        resource_tracker.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = spawn


def _spawn_apart(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Spawn as `multiprocessing.util.spawnv_passfds`, in a session of its own, which keeps nobody's pipes open."""
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in (0, 1)
    ]
    # To itself: it is inherited then.
    actions += [(os.POSIX_SPAWN_DUP2, each, each) for each in passfds]
    return os.posix_spawn(path, list(args), os.environ, file_actions=actions, setsid=True)


class Workers:
    """The workers of one vLLM: in this process if it is one, else each in its own."""

    def __init__(self, llm: Any, *, lost: Callable[[EngineError], None]) -> None:
        """Watch their processes.

        Args:
            llm: An `LLMEngine` of vLLM.
            lost: Called once, on a thread of its own, when one has ended by itself; all have been ended then.
        """
        self._llm: Final = llm
        self._lost: Final = lost
        self.failure: EngineError | None = None
        self.processes: Final[list[BaseProcess]] = [each.proc for each in getattr(llm.model_executor, "workers", [])]
        self._closing, self._closed = os.pipe()
        self._thread: Final = threading.Thread(target=self._watch, name="engine:workers", daemon=True)
        if self.processes:
            self._thread.start()

    def call(self, method: str, *args: object) -> list[Any]:
        """The answer of each worker, by rank.

        Raises:
            CosmosError: One failed with it.
            EngineError: The process of one has ended.
        """
        with self.told():
            answers: Sequence[Answer[Any]] = self._llm.collective_rpc(method, timeout=_CALL_S, args=args)
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers]

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """While vLLM is called: an error that comes of a process that has ended is told as that.

        Raises:
            EngineError: The process of a worker has ended.
        """
        try:
            yield
        except Exception as error:
            if self.processes and multiprocessing.connection.wait([each.sentinel for each in self.processes], 0.5):
                self._thread.join(_LEAVE_S)
            if self.failure is not None:
                raise self.failure from error
            raise

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._closed >= 0:
            os.close(self._closed)
            self._closed = -1
            if self.processes and threading.current_thread() is not self._thread:
                self._thread.join(_LEAVE_S)
            os.close(self._closing)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """While vLLM shuts down: it would wait for its workers longer than these are worth, and leave some behind."""
        timer = threading.Timer(_BEGIN_S, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.join()
            for process in self.processes:
                process.join(_LEAVE_S)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()

    def _watch(self) -> None:
        ranks = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        ended = multiprocessing.connection.wait([*ranks, self._closing])
        if self._closing in ended:
            return
        rank = next(ranks[each] for each in ended if isinstance(each, int))
        process = self.processes[rank]
        code = _exit_code(process)
        where = f"vLLM's worker of rank {rank} (process {process.pid})"
        if code is not None and code < 0:
            self.failure = EngineLostError(
                f"{where} was ended by signal {-code}: the replica ends with it; one that is killed again and again "
                "lacks memory, see the replica's log"
            )
        else:
            self.failure = EngineError(f"{where} ended with exit code {code}: the replica's log has its error")
        # The others wait for it for ever, and vLLM for them.
        self._kill()
        self._lost(self.failure)


def _exit_code(process: BaseProcess) -> int | None:
    """The exit code of a process that has ended; None if it cannot be known."""
    # Another thread may be the one that is told, and this one has to wait until it has written it down.
    end = time.monotonic() + _TOLD_S
    while process.exitcode is None and time.monotonic() < end:
        time.sleep(0.01)
    return process.exitcode
