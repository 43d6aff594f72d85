"""A rollout engine that runs on one thread: commands between steps, requests in flight, pauses, updates.

An engine of its own kind adds how a model is built, what a step does and how weights are copied.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Final, Generic, Protocol, TypeVar

import torch

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import (
    CachePolicy,
    EngineContext,
    EngineStats,
    FinishReason,
    Handle,
    PauseMode,
    Request,
    TensorSlice,
)
from cosmos_core.replica.profiler import Profiler, span
from cosmos_core.rollout.serving.commands import Commands, LostProcessError, broken
from cosmos_core.rollout.serving.requests import RequestState, S
from cosmos_core.rollout.serving.updates import Update
from cosmos_core.weights.storages import Storages, give_back

_JOIN_S: Final = 20.0
"""How long a shutdown waits for the step under way: a device that hangs must not keep the process from ending."""


T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class SampleQueue(Protocol[T_contra]):
    """Samples that run or wait, on the engine's thread."""

    version: int

    @property
    def num_running(self) -> int:
        """Samples that generate."""
        ...

    @property
    def num_waiting(self) -> int:
        """Samples not started, or set back."""
        ...

    @property
    def has_work(self) -> bool:
        """True if a step would do anything."""
        ...

    def add(self, samples: Iterable[T_contra], /) -> None:
        """Let samples wait."""
        ...

    def remove(self, finished: Iterable[T_contra], /) -> None:
        """Take samples out, running or waiting."""
        ...


class ServedEngine(abc.ABC, Generic[S]):
    """Serves on one thread, which alone touches the model and the scheduler.

    Every public method that does posts a command, which runs between two steps; so a pause, an update or an abort
    falls between two units by construction.

    Attributes:
        profiler: Traces steps; None where nobody can ask for it.
    """

    profiler: Profiler | None = None

    def __init__(self, context: EngineContext) -> None:
        self._context: Final = context
        self._commands = Commands()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._requests: dict[str, RequestState[S]] = {}
        self._number = 0
        self._held: list[RequestState[S]] = []
        self._update: Update | None = None
        self._is_asleep = False
        self._is_blank = False
        """Whether no weights were loaded since it slept."""
        self._stopping = False
        self._loss: EngineError | None = None
        self._paused_since: float | None = None
        self._draining: tuple[int, list[Future[None]]] | None = None
        self._generated = 0
        self._prompted = 0
        self._reused = 0
        self._busy_s = 0.0
        self._paused_s = 0.0

    # -- what each engine adds ----------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def _queue(self) -> SampleQueue[S]:
        """Samples that run or wait, once it is built."""

    @abc.abstractmethod
    def _admit(self, request: Request) -> RequestState[S]:
        """A request on its way, its number still to be given; EngineError if it cannot be generated."""

    @abc.abstractmethod
    def _build(self) -> None:
        """Make the model and all that serves it, on the engine's thread."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """One step; it hands what has ended to `_finish`."""

    @abc.abstractmethod
    def _tensors_to_write(self) -> Mapping[str, torch.Tensor]:
        """Tensors that an update writes, by canonical name: shapes and dtypes count."""

    def _new_update(self, version: int) -> Update:
        """An update to a version, to be written."""
        return Update(version, self._tensors_to_write())

    @abc.abstractmethod
    def _apply(self, update: Update, cache: CachePolicy) -> str:
        """Copy an update in, between two steps; the digest of what is loaded then."""

    @abc.abstractmethod
    def _unbuild(self) -> None:
        """Free what `_build` made, or had made when it failed, on the engine's thread. Idempotent."""

    def _free(self) -> None:
        """Give up the memory of weights, and of caches if it has some, paused, on the engine's thread."""
        self._storages = self._weights_memory()
        self._storages.free()

    def _allocate(self) -> None:
        """Take that of weights again, to be written by an update."""
        self._storages.allocate()

    def _weights_memory(self) -> Storages:
        """The memory of weights that `sleep` gives up."""
        return Storages(self._tensors_to_write().values(), self._context.device)

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the model, check that it can be served, begin to serve.

        Raises:
            CosmosError: The model cannot be built, or not be served; says why.
        """
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="engine", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:
            self._thread.join(_JOIN_S)
            raise
        # A thread that is still inside torch when the interpreter goes away would abort the process.
        atexit.register(self.shutdown)

    def shutdown(self) -> None:
        """Stop; unfinished requests end as aborted. Idempotent."""
        atexit.unregister(self.shutdown)
        if self._thread is None:
            return
        # A thread that failed or stops already takes no more commands, but may still be freeing what it holds.
        with contextlib.suppress(EngineError):
            self._commands.post(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _stop(self) -> None:
        self._stopping = True

    def _serve(self, started: Future[None]) -> None:
        try:
            self._build()
            self._open()
        except BaseException as error:  # noqa: BLE001 - `start` raises it
            self._unbuild()
            started.set_exception(error)
            return
        try:
            started.set_result(None)
            with torch.inference_mode():
                self._run()
        finally:
            self._unbuild()

    def _open(self) -> None:
        """Take commands, unless what was built is broken already, of which no command could tell before."""
        self._commands.open()
        if self._loss is not None:
            self._commands.close(self._loss)
            raise self._loss

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._commands.drain(wait=self._paused_since is not None or not self._queue.has_work)
                if not self._stopping and self._paused_since is None and self._queue.has_work:
                    self._step()
            self._end_all()
        except Exception as error:  # noqa: BLE001 - the supervised boundary of this thread: every waiter hears of it
            failure = broken(error)
            self._close(failure)
            for parent in self._in_flight():
                parent.handle.finish(failure)
        else:
            self._close(EngineError("the engine is shut down"))

    def _lose(self, error: EngineError) -> None:
        """Let the engine fail of the end of a process that it needs, even if it has nothing to do; from any thread."""

        def fail() -> None:
            raise LostProcessError(error) from error

        # Before the command: while there are none yet, this is looked at as soon as there are.
        self._loss = error
        with contextlib.suppress(EngineError):
            self._commands.post(fail)

    def _close(self, reason: EngineError) -> None:
        self._commands.close(reason)
        if self._draining is not None:
            for waiter in self._draining[1]:
                waiter.set_exception(reason)

    def health(self) -> None:
        """Return if the engine can serve.

        Raises:
            EngineLostError: A process that it needs is gone.
            EngineError: It cannot for any other reason; the thread's error is chained.
        """
        closed = self._commands.closed
        if closed is not None:
            raise type(closed)(str(closed)) from (closed.__cause__ or closed)

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        since, queue = self._paused_since, self._queue
        return EngineStats(
            num_running=queue.num_running,
            num_waiting=queue.num_waiting + sum(parent.num_unfinished for parent in self._held),
            generated_units=self._generated,
            prompt_units=self._prompted,
            busy_s=self._busy_s,
            paused_s=self._paused_s + (0.0 if since is None else time.monotonic() - since),
            weight_version=queue.version,
            cached_units=self._reused,
        )

    def end_profile(self) -> None:
        """Let a profile that goes on end with what it has."""
        if self.profiler is not None:
            self._commands.call(self.profiler.finish)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Queue requests; those of one call enter together.

        Raises:
            EngineError: A request does not fit or asks for what cannot be done; none of the call is queued then.
        """
        parents = [self._admit(request) for request in requests]
        with self._lock:
            names = [request.request_id for request in requests]
            taken = [name for name in names if name in self._requests or names.count(name) > 1]
            if taken:
                raise EngineError(f"request id {taken[0]!r} is in flight already")
            for parent in parents:
                self._number += 1
                parent.number = self._number
            self._requests.update((parent.request.request_id, parent) for parent in parents)
        try:
            self._commands.post(lambda: self._enter(parents))
        except EngineError:
            with self._lock:
                for name in names:
                    del self._requests[name]
            raise
        return [parent.handle for parent in parents]

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests at the next unit, partial results kept; unknown ids are ignored."""
        names = tuple(request_ids)
        self._commands.post(lambda: self._abort(names))

    def _enter(self, parents: list[RequestState[S]]) -> None:
        for parent in parents:
            if self._draining is not None:
                self._held.append(parent)
            else:
                self._queue.add(parent.samples)

    def _abort(self, names: Sequence[str]) -> None:
        parents = [self._requests[name] for name in names if name in self._requests]
        self._held = [parent for parent in self._held if parent not in parents]
        ended = [sample for parent in parents for sample in parent.samples if sample.reason is None]
        for sample in ended:
            sample.reason = FinishReason.ABORTED
        self._finish(ended)

    def _end_all(self) -> None:
        self._abort([parent.request.request_id for parent in self._in_flight()])

    def _in_flight(self) -> list[RequestState[S]]:
        with self._lock:
            return list(self._requests.values())

    def _finish(self, ended: Sequence[S]) -> None:
        self._queue.remove(ended)
        for sample in ended:
            parent = sample.parent
            parent.num_unfinished -= 1
            if parent.num_unfinished == 0:
                with self._lock:
                    del self._requests[parent.request.request_id]
                parent.handle.finish([one.generated(self._queue.version) for one in parent.samples])

    def _step(self) -> None:
        begin = time.monotonic()
        if self.profiler is None:
            self._advance()
        else:
            with self.profiler.step(), span("generate"):
                self._advance()
        self._busy_s += time.monotonic() - begin
        if self._draining is not None:
            self._check_drained()

    # -- pauses -------------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode = "keep") -> None:
        """Return when nothing generates: `keep` holds what is in flight, `abort` ends it, `wait` finishes it.

        Requests submitted during `wait` are held until `resume`, which also ends the wait early.
        """
        waiter: Future[None] = Future()
        self._commands.call(lambda: self._pause(mode, waiter))
        waiter.result()

    def _pause(self, mode: PauseMode, waiter: Future[None]) -> None:
        if mode == "wait" and self._paused_since is None:
            number, waiters = self._draining or (self._number, [])
            self._draining = (number, [*waiters, waiter])
            self._check_drained()
            return
        if mode == "abort":
            self._end_all()
        if self._paused_since is None:
            self._paused_since = time.monotonic()
        waiter.set_result(None)

    def _check_drained(self) -> None:
        assert self._draining is not None
        if self._queue.has_work:
            return
        _, waiters = self._draining
        self._paused_since = time.monotonic()
        for waiter in waiters:
            waiter.set_result(None)
        self._draining = (0, [])

    def resume(self) -> None:
        """Go on after `pause`."""
        self._commands.call(self._resume)

    def _resume(self) -> None:
        self._check_loaded()
        if self._paused_since is not None:
            self._paused_s += time.monotonic() - self._paused_since
            self._paused_since = None
        waiters = [] if self._draining is None else self._draining[1]
        self._draining = None
        for waiter in waiters:
            waiter.set_result(None)
        held, self._held = self._held, []
        self._enter(held)

    # -- weights ------------------------------------------------------------------------------------------------------

    def begin_update(self, version: int) -> None:
        """Open an update to `version`.

        Raises:
            WeightSyncError: An update is open already.
        """
        if self._update is not None:
            raise WeightSyncError(f"an update to version {self._update.version} is open; commit or abort it first")
        self._update = self._new_update(version)

    def write(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Give the content of one slice."""
        self._open_update().write_to(rank, piece, data)

    def commit_update(self, cache: CachePolicy = "keep") -> str:
        """Copy everything between two units; what is in flight goes on with the new weights."""
        update = self._open_update()
        update.check()
        digest = self._commands.call(lambda: self._load(update, cache))
        self._update = None
        update.close()
        return digest

    def _load(self, update: Update, cache: CachePolicy) -> str:
        if self._is_asleep:
            raise EngineError("the engine sleeps: wake it before weights are loaded")
        digest = self._apply(update, cache)
        self._is_blank = False
        return digest

    def abort_update(self) -> None:
        """Forget an open update; what is loaded stays."""
        update, self._update = self._update, None
        if update is not None:
            update.close()

    def _open_update(self) -> Update:
        if self._update is None:
            raise WeightSyncError("no update is open; call begin_update first")
        return self._update

    # -- sleep --------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free weights and caches; what is in flight stays, and computes its cache anew when it goes on."""
        self._commands.call(self._sleep)

    def _sleep(self) -> None:
        if self._paused_since is None:
            raise EngineError("the engine generates: pause it before it sleeps")
        if not self._is_asleep:
            self._is_asleep = self._is_blank = True
            self._free()
            give_back(self._context.device)

    def wake(self) -> None:
        """Take the memory again; weights are loaded by an update."""
        self._commands.call(self._wake)

    def _wake(self) -> None:
        if self._is_asleep:
            self._allocate()
            self._is_asleep = False

    def _check_loaded(self) -> None:
        """Raise an EngineError if there are no weights to compute with."""
        if self._is_blank:
            raise EngineError("no weights are loaded since the engine slept: wake it, and load a version")

    def _computed(self, compute: Callable[[], T]) -> T:
        """The result of a computation under the loaded weights, on the engine's thread."""

        def checked() -> T:
            self._check_loaded()
            return compute()

        return self._commands.call(checked)
