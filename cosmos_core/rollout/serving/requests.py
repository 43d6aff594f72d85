"""Requests in flight: the handle, the samples, and those that wait for a seat."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import attrs

from cosmos_core.errors import EngineError
from cosmos_core.protocols import FinishReason, Generated, Request

if TYPE_CHECKING:
    from cosmos_core.protocols import Handle


class ServedHandle:
    """A request in flight (`protocols.Handle`)."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._condition = threading.Condition()
        self._results: list[Generated] | None = None
        self._error: EngineError | None = None
        self._callbacks: list[Callable[[Handle], None]] = []

    @property
    def is_done(self) -> bool:
        """True if it is finished or failed."""
        return self._results is not None or self._error is not None

    def result(self, timeout_s: float | None = None) -> list[Generated]:
        """Wait for all samples, in the order of their index."""
        with self._condition:
            if not self._condition.wait_for(lambda: self.is_done, timeout_s):
                raise TimeoutError(f"request {self.request.request_id!r} is not finished after {timeout_s} s")
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


class Sample(Protocol):
    """One sample of a request, at its place among these; `reason` says why it ended."""

    index: int
    reason: FinishReason | None

    @property
    def parent(self) -> RequestState[Any]:
        """The request of the sample."""
        ...

    def generated(self, version: int) -> Generated:
        """The result, partial if it was aborted; `version` stands in where nothing was generated."""
        ...


S = TypeVar("S", bound=Sample)


@attrs.define(eq=False)
class RequestState(Generic[S]):
    """A request in flight, with its number among all, its samples by index, and how many of these go on."""

    request: Request
    handle: ServedHandle
    number: int
    samples: list[S] = attrs.field(init=False, factory=list)
    num_unfinished: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.num_unfinished = self.request.sampling.num_samples
        self.samples = [self.begin(index) for index in range(self.num_unfinished)]

    def begin(self, index: int) -> S:
        """Sample `index`, of which nothing is generated."""
        raise NotImplementedError


def place_of(sample: Sample) -> tuple[int, int, int]:
    """The place of a sample among others: by priority, then by arrival."""
    return sample.parent.request.priority, sample.parent.number, sample.index


class WaitingQueue(Generic[S]):
    """The samples that wait, in the order in which they enter."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, S]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, samples: Iterable[S]) -> None:
        """Let samples wait; one that was set back keeps its place among the others."""
        for sample in samples:
            heapq.heappush(self._heap, (*place_of(sample), sample))

    def first(self) -> S:
        """The sample whose turn it is; there must be one."""
        return self._heap[0][3]

    def take(self) -> S:
        """Take out whose turn it is; there must be one."""
        return heapq.heappop(self._heap)[3]

    def remove(self, gone: Collection[S]) -> None:
        """Take out those of `gone` that wait."""
        self._heap = [entry for entry in self._heap if entry[3] not in gone]
        heapq.heapify(self._heap)
