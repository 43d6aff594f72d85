"""An engine without tokens, as small as one can be: it denoises for `latent_model`, one step a unit.

One lock stands for the queue of commands: it is held during each step, so whatever else takes it falls between two.

Shape legend: D width, T units generated so far.
"""

import math
import random
import threading
import time
from concurrent import futures

import attrs
import numpy as np
import torch
from faulty_engine_denoiser import SIGMA, array, view

from cosmos_core.errors import EngineError, WeightSyncError
from cosmos_core.protocols import (
    EngineCapabilities,
    EngineStats,
    FinishReason,
    Generated,
    NoOptions,
    Provider,
    TensorSlice,
    hookimpl,
)
from cosmos_core.types import Array, Payload
from cosmos_core.weights.digest import digest_of
from cosmos_core.weights.shards import canonical_tensors, dtype_name


def noise(seed, index, unit, width):
    draw = random.Random(f"{seed}/{index}/{unit}")
    return torch.tensor([draw.gauss(0.0, 1.0) for _ in range(width)])


def box(piece):
    return tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape, strict=True))


@attrs.define(eq=False)
class Sample:
    request: object
    index: int
    path: list
    logprobs: list = attrs.field(factory=list)
    versions: list = attrs.field(factory=list)
    reason: FinishReason | None = None

    def step(self, module, condition_D, version):
        sampling, width = self.request.sampling, len(condition_D)
        mean_D = module(self.path[-1], condition_D).float()
        spread = SIGMA * math.sqrt(sampling.temperature)
        self.path.append(mean_D + spread * noise(self.request.seed, self.index, len(self.versions), width))
        variance = SIGMA**2 * (sampling.temperature or 1.0)
        error = (self.path[-1] - mean_D).square().sum().item()
        logprob = -error / (2 * variance) - 0.5 * width * math.log(2 * math.pi * variance)
        if not math.isfinite(logprob):
            raise EngineError("the model gives states that are not finite")
        self.logprobs.append(logprob)
        self.versions.append(version)
        if len(self.versions) == sampling.max_units:
            self.reason = FinishReason.LENGTH

    def generated(self, version):
        versions = np.asarray(self.versions, np.int32)
        arrays = {
            **self.request.prompt.arrays,
            "path": array(torch.stack(self.path).numpy()),
            "logprobs": array(np.asarray(self.logprobs)),
            "versions": Array(dtype="int32", shape=versions.shape, data=versions.tobytes()),
        }
        return Generated(
            payload=Payload(kind="latents", arrays=arrays),
            reason=self.reason,
            oldest_version=min(self.versions, default=version),
            newest_version=max(self.versions, default=version),
            num_units=len(self.versions),
        )


class Ticket:
    def __init__(self, request):
        self.request = request
        self.condition_D = view(request.prompt, "condition")
        self.outcome = futures.Future()
        start = [noise(request.seed, index, -1, len(self.condition_D)) for index in range(request.sampling.num_samples)]
        self.samples = [Sample(request, index, [state]) for index, state in enumerate(start)]

    def result(self, timeout_s=None):
        return self.outcome.result(timeout_s)

    def add_done_callback(self, callback):
        self.outcome.add_done_callback(lambda _: callback(self))


class Engine:
    def __init__(self, options, context):
        self._context = context
        self._changed = threading.Condition(threading.RLock())
        self._tickets, self._held = [], []
        self._is_draining = self._is_stopping = False
        self._closed = EngineError("not started")
        self._paused_at = self._update = None
        self._version = self._generated = 0
        self._busy_s = self._paused_s = 0.0

    def start(self):
        context = self._context
        self._module = context.model.build(seed=context.seed, dtype=context.dtype, device=context.device)
        self._tensors = canonical_tensors(self._module)
        self._closed = None
        self._thread = threading.Thread(target=self._serve, name="latents", daemon=True)
        self._thread.start()

    @torch.inference_mode()
    def _serve(self):
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping or (self._tickets and self._paused_at is None))
                if self._is_stopping:
                    return
                try:
                    self._step()
                except EngineError as error:
                    self._closed = error
                    for ticket in self._tickets + self._held:
                        ticket.outcome.set_exception(error)
                    return
            time.sleep(0.0005)

    def _step(self):
        began = time.monotonic()
        running = [(t, s) for t in self._tickets for s in t.samples if s.reason is None][: self._context.max_in_flight]
        for ticket, sample in running:
            sample.step(self._module, ticket.condition_D, self._version)
            self._generated += 1
        self._busy_s += time.monotonic() - began
        self._settle()

    def _settle(self):
        done = [t for t in self._tickets + self._held if all(s.reason for s in t.samples)]
        self._tickets = [t for t in self._tickets if t not in done]
        self._held = [t for t in self._held if t not in done]
        for ticket in done:
            ticket.outcome.set_result([sample.generated(self._version) for sample in ticket.samples])

    def _end(self, tickets):
        for sample in (sample for ticket in tickets for sample in ticket.samples):
            sample.reason = sample.reason or FinishReason.ABORTED
        self._settle()

    def shutdown(self):
        with self._changed:
            self._closed = self._closed or EngineError("shut down")
            self._is_stopping = True
            self._end(self._tickets + self._held)
            self._changed.notify_all()
        self._thread.join()

    def health(self):
        if self._closed is not None:
            raise self._closed

    def stats(self):
        with self._changed:
            left = sum(s.reason is None for t in self._tickets for s in t.samples)
            running = min(left, self._context.max_in_flight)
            held = sum(s.reason is None for t in self._held for s in t.samples)
            now = time.monotonic()
            return EngineStats(
                num_running=running,
                num_waiting=left - running + held,
                generated_units=self._generated,
                prompt_units=self._generated,
                busy_s=self._busy_s,
                paused_s=self._paused_s + (now - self._paused_at if self._paused_at else 0.0),
                weight_version=self._version,
            )

    def submit(self, requests):
        for request in requests:
            sampling = request.sampling
            proper = sampling.temperature >= 0 and (sampling.temperature > 0 or sampling.num_samples == 1)
            if request.prompt.kind != "latents" or not proper or not 0 < sampling.max_units < 64:
                raise EngineError(f"request {request.request_id!r} cannot be generated: {sampling}")
        with self._changed:
            self.health()
            tickets = [Ticket(request) for request in requests]
            if self._is_draining:
                self._held += tickets
            else:
                self._tickets = sorted(self._tickets + tickets, key=lambda ticket: ticket.request.priority)
            self._changed.notify_all()
        return tickets

    def abort(self, request_ids):
        with self._changed:
            self._end([t for t in self._tickets + self._held if t.request.request_id in request_ids])

    def pause(self, mode="keep"):
        with self._changed:
            waited = []
            if mode == "wait" and self._paused_at is None:
                self._is_draining, waited = True, self._tickets
        futures.wait([ticket.outcome for ticket in waited])
        with self._changed:
            if mode == "abort":
                self._end(self._tickets + self._held)
            self._paused_at = self._paused_at or time.monotonic()

    def resume(self):
        with self._changed:
            self._paused_s += time.monotonic() - self._paused_at if self._paused_at else 0.0
            self._paused_at, self._is_draining = None, False
            self._tickets, self._held = self._tickets + self._held, []
            self._changed.notify_all()

    def layout(self):
        return {
            0: [
                (TensorSlice(name=name, start=(0,) * t.ndim, shape=tuple(t.shape)), dtype_name(t.dtype))
                for name, t in self._tensors.items()
            ]
        }

    def begin_update(self, version):
        if self._update is not None:
            raise WeightSyncError(f"no update to version {version} can begin")
        self._update = (version, {name: torch.ones(t.shape, dtype=torch.bool) for name, t in self._tensors.items()}, [])

    def write(self, rank, piece, data):
        if rank or self._update is None:
            raise WeightSyncError(f"nothing can be written to rank {rank}")
        self._update[1][piece.name][box(piece)] = False
        self._update[2].append((piece, data))

    def commit_update(self, cache="keep"):
        if self._update is None or any(missing.any() for missing in self._update[1].values()):
            raise WeightSyncError("the update is not whole")
        with self._changed, torch.inference_mode():
            for piece, data in self._update[2]:
                self._tensors[piece.name][box(piece)].copy_(data)
            self._version = self._update[0]
            self._update = None
            return digest_of(self._tensors)

    def abort_update(self):
        self._update = None

    def score(self, payloads, *, temperature):
        found = {}
        with self._changed, torch.inference_mode():
            for batch in self._context.model.pack(payloads, budget=10_000):
                logprobs_N = self._context.model.decide(self._module, batch, temperature=temperature).logprobs_N
                found.update(zip(batch.sequences, torch.split(logprobs_N, list(batch.num_decisions)), strict=True))
        return [found[index] for index in range(len(payloads))]


@hookimpl
def cosmos_engine():
    capabilities = EngineCapabilities(payload_kinds=frozenset({"latents"}))
    return Provider(create=Engine, options=NoOptions, capabilities=capabilities)
