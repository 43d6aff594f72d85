"""What is in flight, whatever it is made of: a request with its handle, and its samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import attrs

from cosmos_core.errors import EngineError
from cosmos_core.protocols import FinishReason, Generated, Request

if TYPE_CHECKING:
    from cosmos_core.protocols import Handle


class ServedHandle:
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


class Sample(Protocol):
    """One sample of a request.

    Attributes:
        index: Its place among the request's samples.
        reason: Why it ended; None while it goes on.
    """

    index: int
    reason: FinishReason | None

    @property
    def flight(self) -> Flight[Any]:
        """Its request."""
        ...

    def generated(self, version: int) -> Generated:
        """The result, partial if it was aborted; `version` stands in where nothing was generated."""
        ...


S = TypeVar("S", bound=Sample)


@attrs.define(eq=False)
class Flight(Generic[S]):
    """A request in flight.

    Attributes:
        request: The request.
        handle: Its handle.
        number: Its place among all requests.
        samples: Its samples, in the order of their index.
        num_unfinished: Samples that go on.
    """

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
