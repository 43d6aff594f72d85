"""What is in flight: a request with its handle, and each of its samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch

from cosmos_core.errors import EngineError
from cosmos_core.protocols import Conditioning, FinishReason, Generated, Request
from cosmos_core.rollout.serving.randomness import sample_key
from cosmos_core.types import Array, Payload
from cosmos_core.weights.shards import dtype_name

if TYPE_CHECKING:
    from cosmos_core.protocols import Handle


class EmbeddedHandle:
    """A request in flight (`protocols.Handle`)."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._condition = threading.Condition()
        self._results: list[Generated] | None = None
        self._error: EngineError | None = None
        self._callbacks: list[Callable[[Handle], None]] = []

    @property
    def request(self) -> Request:
        """The request."""
        return self._request

    @property
    def is_done(self) -> bool:
        """Whether it is finished or failed."""
        return self._results is not None or self._error is not None

    def result(self, timeout_s: float | None = None) -> list[Generated]:
        """Wait for all samples, in the order of their index."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.is_done, timeout_s):
                raise TimeoutError(f"request {self._request.request_id!r} is not finished after {timeout_s} s")
        if self._error is not None:
            raise type(self._error)(str(self._error)) from self._error
        assert self._results is not None
        return self._results

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Call `callback(self)` once finished, on the engine's thread (at once if it is already)."""
        with self._condition:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, results: list[Generated] | EngineError) -> None:
        """Give the outcome, on the engine's thread; the first one stands."""
        with self._condition:
            if self.is_done:
                return
            if isinstance(results, EngineError):
                self._error = results
            else:
                self._results = results
            self._condition.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


@attrs.define(eq=False)
class Sequence:
    """One sample of a request.

    Attributes:
        flight: Its request.
        index: Its place among the request's samples.
        tokens: Prompt, then what was generated.
        logprobs: Of each generated unit.
        spans: (first generated unit, weight version), ascending.
        slot: Its row of the cache; -1 while it waits or when it is finished.
        cached: Units in the cache, while it is in a slot but not decoding yet.
        prefix_version: Weight version under which its prompt was cached.
        origin: The sample whose computation of the prompt is in its slot; itself, or one that it was copied from.
        records: What forwards recorded, by name: for each unit, in order (see `records`).
        reason: Why it ended; None while it goes on.
    """

    flight: Flight
    index: int
    tokens: list[int]
    logprobs: list[float] = attrs.field(factory=list)
    spans: list[tuple[int, int]] = attrs.field(factory=list)
    slot: int = -1
    cached: int = 0
    prefix_version: int = -1
    origin: Sequence | None = None
    records: dict[str, torch.Tensor] = attrs.field(factory=dict)
    reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        """Units generated so far."""
        return len(self.logprobs)

    @property
    def key(self) -> int:
        """Key of its random numbers."""
        return sample_key(self.flight.request.seed, self.index)

    def mark(self, version: int) -> None:
        """Its next units come of `version`."""
        if self.spans and self.spans[-1][0] == self.num_generated:
            self.spans.pop()
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((self.num_generated, version))

    def generated(self, version: int) -> Generated:
        """The result, partial if it was aborted; `version` stands in where nothing was generated."""
        starts = [start for start, _ in self.spans if start < self.num_generated]
        versions = [spanned for _, spanned in self.spans[: len(starts)]]
        sizes = np.diff([*starts, self.num_generated])
        payload = Payload(
            kind="tokens",
            arrays={
                **self.flight.request.prompt.arrays,
                "completion": _array("int32", np.asarray(self.tokens[self.flight.num_prompt :], np.int32)),
                "logprobs": _array("float32", np.asarray(self.logprobs, np.float32)),
                "versions": _array("int32", np.repeat(np.asarray(versions, np.int32), sizes)),
                **self._recorded(),
            },
        )
        return Generated(
            payload=payload,
            reason=self.reason or FinishReason.ABORTED,
            oldest_version=min(versions, default=version),
            newest_version=max(versions, default=version),
            num_units=self.num_generated,
        )

    def _recorded(self) -> dict[str, Array]:
        """What was recorded of each unit but the last; nothing where nothing was generated: a forward may lack."""
        if not self.num_generated:
            return {}
        return {name: _recorded(rows[: len(self.tokens) - 1]) for name, rows in self.records.items()}


@attrs.define(eq=False)
class Flight:
    """A request in flight: its samples share the prompt.

    Attributes:
        request: The request.
        handle: Its handle.
        number: Its place among all requests.
        prompt: Token ids of its prompt.
        conditioning: How its prompt enters, where the ids do not say it all.
        sequences: Its samples.
        num_unfinished: Samples that go on.
    """

    request: Request
    handle: EmbeddedHandle
    number: int
    prompt: list[int]
    conditioning: Conditioning | None = None
    sequences: list[Sequence] = attrs.field(init=False)
    num_unfinished: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.num_unfinished = self.request.sampling.num_samples
        self.sequences = [Sequence(self, index, list(self.prompt)) for index in range(self.num_unfinished)]

    @property
    def num_prompt(self) -> int:
        """Units of the prompt."""
        return len(self.prompt)

    @property
    def longest(self) -> int:
        """Units of the prompt and of a completion, at most."""
        return self.num_prompt + self.request.sampling.max_units

    @property
    def offset(self) -> int:
        """What is added to the place of a unit behind the prompt to make its position; 0 where both are the same."""
        return offset_of(self.conditioning)


def offset_of(conditioning: Conditioning | None) -> int:
    """See `Flight.offset`."""
    return 0 if conditioning is None else conditioning.next_position - conditioning.positions.shape[-1]


def prompt_ids(payload: Payload) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The `prompt` of a payload, int32 [P]."""
    return np.frombuffer(payload.arrays["prompt"].data, np.int32)


def _recorded(rows: torch.Tensor) -> Array:
    """Rows as they lie: NumPy does not know every dtype."""
    return Array(dtype=dtype_name(rows.dtype), shape=tuple(rows.shape), data=rows.view(torch.uint8).numpy().tobytes())


def _array(dtype: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Array:
    return Array(dtype=dtype, shape=values.shape, data=values.tobytes())
