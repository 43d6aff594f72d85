"""The embedded engine: one thread that runs commands and steps in turn (`protocols.RolloutEngine`)."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Final

import torch

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import (
    CachePolicy,
    Conditioned,
    EngineContext,
    EngineStats,
    FinishReason,
    Handle,
    PauseMode,
    Request,
    TensorSlice,
)
from cosmos_core.rollout.embedded.cache import SlotCache
from cosmos_core.rollout.embedded.commands import Commands
from cosmos_core.rollout.embedded.given import to_score
from cosmos_core.rollout.embedded.options import EmbeddedOptions
from cosmos_core.rollout.embedded.prompts import Prompts
from cosmos_core.rollout.embedded.records import Recorder
from cosmos_core.rollout.embedded.requests import check_request, condition
from cosmos_core.rollout.embedded.runner import Runner
from cosmos_core.rollout.embedded.sampler import draw
from cosmos_core.rollout.embedded.scheduler import Plan, Scheduler
from cosmos_core.rollout.embedded.sequence import EmbeddedHandle, Flight, prompt_ids
from cosmos_core.rollout.embedded.sequence import Sequence as Sample
from cosmos_core.rollout.embedded.slots import SlotNumbers
from cosmos_core.rollout.embedded.support import adopt
from cosmos_core.rollout.embedded.updates import Update, whole_layout
from cosmos_core.types import Payload
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors

_JOIN_S: Final = 20.0
"""How long a shutdown waits for the step under way: a device that hangs must not keep the process from ending."""


class EmbeddedEngine:
    """Generates with continuous batching, in this process.

    Only the engine thread touches the module, the cache and the scheduler. Every public method that does posts a
    command, which runs between two steps; so a pause, an update or an abort falls between two units by construction.
    """

    def __init__(self, options: EmbeddedOptions, context: EngineContext) -> None:
        self._options = options
        self._context = context
        self._stop_ids = context.model.facts().stop_ids
        self._commands = Commands()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}
        self._number = 0
        self._held: list[Flight] = []
        self._update: Update | None = None
        self._stopping = False
        self._paused_since: float | None = None
        self._draining: tuple[int, list[Future[None]]] | None = None
        self._generated = 0
        self._prompted = 0
        self._busy_s = 0.0
        self._paused_s = 0.0

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build the model, check that it can be served, start the thread.

        Raises:
            EngineError: The model uses a feature that this engine does not support; names it.
        """
        context, options = self._context, self._options
        module = context.model.build(seed=context.seed, dtype=context.dtype, device=context.device)
        module.eval().requires_grad_(False)
        self._prompts = Prompts(context.model, module) if isinstance(context.model, Conditioned) else None
        self._runner = Runner(module, context.device, self._prompts)
        with torch.inference_mode():
            shapes = adopt(module, self._runner, context_length=context.context_length, verify=options.verify)
        self._recorder = Recorder.of(context.model, module)
        self._tensors = canonical_tensors(module)
        self._vocabulary = int(module.get_input_embeddings().num_embeddings)  # type: ignore[operator]
        self._cache = SlotCache(
            shapes,
            num_slots=context.max_in_flight,
            step=options.cache_step,
            dtype=context.dtype,
            device=context.device,
        )
        self._numbers = SlotNumbers(context.max_in_flight, self._vocabulary, context.device)
        self._scheduler = Scheduler(
            self._cache, self._numbers, num_slots=context.max_in_flight, prefill_units=options.prefill_units
        )
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="engine", daemon=True)
        self._thread.start()
        started.wait()
        # A thread that is still inside torch when the interpreter goes away would abort the process.
        atexit.register(self.shutdown)

    def shutdown(self) -> None:
        """Stop; unfinished requests end as aborted. Idempotent."""
        atexit.unregister(self.shutdown)
        if self._thread is None or self._commands.closed is not None:
            return
        self._commands.post(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _stop(self) -> None:
        self._stopping = True

    def _serve(self, started: threading.Event) -> None:
        try:
            with torch.inference_mode():
                self._commands.open()
                started.set()
                while not self._stopping:
                    self._commands.drain(wait=self._paused_since is not None or not self._scheduler.has_work)
                    if not self._stopping and self._paused_since is None and self._scheduler.has_work:
                        self._step()
                self._end_all()
        except Exception as error:  # noqa: BLE001 - the supervised boundary of this thread: every waiter hears of it
            failure = EngineError(f"the engine's thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._close(failure)
            for flight in self._in_flight():
                flight.handle.finish(failure)
        else:
            self._close(EngineError("the engine is shut down"))

    def _close(self, reason: EngineError) -> None:
        self._commands.close(reason)
        if self._draining is not None:
            for waiter in self._draining[1]:
                waiter.set_exception(reason)

    def health(self) -> None:
        """Return if the engine can serve, else raise EngineError with the thread's error chained."""
        closed = self._commands.closed
        if closed is not None:
            raise EngineError(str(closed)) from (closed.__cause__ or closed)

    def stats(self) -> EngineStats:
        """Counters and gauges."""
        since = self._paused_since
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + sum(flight.num_unfinished for flight in self._held),
            generated_units=self._generated,
            prompt_units=self._prompted,
            busy_s=self._busy_s,
            paused_s=self._paused_s + (0.0 if since is None else time.monotonic() - since),
            weight_version=scheduler.version,
        )

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Handle]:
        """Queue requests; those of one call enter together.

        Raises:
            EngineError: A request does not fit or asks for what cannot be done; none of the call is queued then.
        """
        for request in requests:
            check_request(request, context_length=self._context.context_length, vocabulary=self._vocabulary)
        conditionings = [
            condition(request.prompt, self._context.model, f"request {request.request_id!r}") for request in requests
        ]
        with self._lock:
            names = [request.request_id for request in requests]
            taken = [name for name in names if name in self._flights or names.count(name) > 1]
            if taken:
                raise EngineError(f"request id {taken[0]!r} is in flight already")
            flights = []
            for request, conditioning in zip(requests, conditionings, strict=True):
                self._number += 1
                prompt = prompt_ids(request.prompt).tolist()
                flights.append(Flight(request, EmbeddedHandle(request), self._number, prompt, conditioning))
            self._flights.update((flight.request.request_id, flight) for flight in flights)
        try:
            self._commands.post(lambda: self._enter(flights))
        except EngineError:
            with self._lock:
                for name in names:
                    del self._flights[name]
            raise
        return [flight.handle for flight in flights]

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests at the next unit, partial results kept; unknown ids are ignored."""
        names = tuple(request_ids)
        self._commands.post(lambda: self._abort(names))

    def _enter(self, flights: list[Flight]) -> None:
        for flight in flights:
            if self._draining is not None:
                self._held.append(flight)
            else:
                self._scheduler.add(flight.sequences)

    def _abort(self, names: Sequence[str]) -> None:
        flights = [self._flights[name] for name in names if name in self._flights]
        self._held = [flight for flight in self._held if flight not in flights]
        ended = [sample for flight in flights for sample in flight.sequences if sample.reason is None]
        for sample in ended:
            sample.reason = FinishReason.ABORTED
        self._finish(ended)

    def _end_all(self) -> None:
        self._abort([flight.request.request_id for flight in self._in_flight()])

    def _in_flight(self) -> list[Flight]:
        with self._lock:
            return list(self._flights.values())

    def _finish(self, ended: Sequence[Sample]) -> None:
        self._scheduler.remove(ended)
        for sample in ended:
            flight = sample.flight
            flight.num_unfinished -= 1
            if flight.num_unfinished == 0:
                with self._lock:
                    del self._flights[flight.request.request_id]
                flight.handle.finish([one.generated(self._scheduler.version) for one in flight.sequences])

    # -- steps --------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        begin = time.monotonic()
        scheduler = self._scheduler
        plan = scheduler.plan()
        self._cache.fit(plan.num_units, scheduler.num_running if plan.uses_cache else 0)
        logits_RV = self._runner.step(plan, self._cache, self._numbers)
        if self._recorder is not None:
            self._recorder.keep(plan)
        if self._prompts is not None:
            self._prompts.retain(plan)
        self._prompted += len(plan.piece_tokens)
        if plan.drawn:
            tokens_R, logprobs_R = draw(logits_RV, self._numbers.drawing(len(plan.drawn), scheduler.traits))
            self._numbers.advance(tokens_R)
            self._take(plan, tokens_R.tolist(), logprobs_R.tolist())
        self._busy_s += time.monotonic() - begin
        if self._draining is not None:
            self._check_drained()

    def _take(self, plan: Plan, tokens: list[int], logprobs: list[float]) -> None:
        if not math.isfinite(sum(logprobs)):
            raise EngineError(
                f"the model gives log-probs that are not finite at weight version {self._scheduler.version}: "
                "its weights or activations overflow"
            )
        ended = []
        for sample, token, logprob in zip(plan.drawn, tokens, logprobs, strict=True):
            sample.tokens.append(token)
            sample.logprobs.append(logprob)
            if token in self._stop_ids:
                sample.reason = FinishReason.STOP
            elif len(sample.logprobs) >= sample.flight.request.sampling.max_units:
                sample.reason = FinishReason.LENGTH
            else:
                continue
            ended.append(sample)
        self._generated += len(tokens)
        if ended:
            self._finish(ended)

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
        if self._scheduler.has_work:
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

    def layout(self) -> Mapping[int, Sequence[tuple[TensorSlice, str]]]:
        """Rank 0 holds every canonical tensor whole."""
        return {0: whole_layout(self._tensors)}

    def begin_update(self, version: int) -> None:
        """Open an update to `version`.

        Raises:
            WeightSyncError: An update is open already, or `version` is older than what is loaded.
        """
        if self._update is not None:
            raise WeightSyncError(f"an update to version {self._update.version} is open; commit or abort it first")
        if version < self._scheduler.version:
            raise WeightSyncError(f"version {version} is older than {self._scheduler.version}, which is loaded")
        self._update = Update(version, self._tensors)

    def write(self, rank: int, piece: TensorSlice, data: torch.Tensor) -> None:
        """Give the content of one slice."""
        if rank != 0:
            raise WeightSyncError(f"rank {rank} does not exist: the embedded engine has rank 0 only")
        self._open_update().write(piece, data)

    def commit_update(self, cache: CachePolicy = "keep") -> str:
        """Copy everything between two units; what is in flight goes on with the new weights."""
        update = self._open_update()
        update.check()
        digest = self._commands.call(lambda: self._apply(update, cache))
        self._update = None
        return digest

    def abort_update(self) -> None:
        """Forget an open update; what is loaded stays."""
        self._update = None

    def _open_update(self) -> Update:
        if self._update is None:
            raise WeightSyncError("no update is open; call begin_update first")
        return self._update

    def _apply(self, update: Update, cache: CachePolicy) -> str:
        update.apply()
        self._scheduler.mark(update.version)
        if self._prompts is not None:
            self._prompts.forget()
        if cache == "recompute":
            self._scheduler.requeue()
        # Hashed here, before the next step: nothing is generated with weights that were not attested.
        return digest_of(self._tensors)

    # -- scoring ------------------------------------------------------------------------------------------------------

    def score(self, payloads: Sequence[Payload], *, temperature: float) -> list[torch.Tensor]:
        """float32 log-probs [N] of each payload's completion under the loaded weights, on the CPU.

        Raises:
            EngineError: `temperature` is not above 0, or a payload has no prompt, is too long, or shows what cannot be
                entered.
        """
        if not temperature > 0:
            raise EngineError(f"cannot score at temperature {temperature}: it must be above 0")
        sequences = to_score(payloads, self._context.model, context_length=self._context.context_length)
        budget = self._options.prefill_units
        return self._commands.call(lambda: self._runner.score(sequences, temperature=temperature, budget=budget))
