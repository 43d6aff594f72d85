"""Drives an engine as a rollout replica does, and lets nothing that it waits for hang the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, Final, TypeVar, final

import torch

from cosmos_core.errors import CosmosError, EngineError
from cosmos_core.protocols import CachePolicy, Generated, Handle, PauseMode, Request, RolloutEngine
from cosmos_core.testing.conformance.plugin import fault
from cosmos_core.weights import slices
from cosmos_core.weights.shards import torch_dtype

T = TypeVar("T")

_POLL_S: Final = 0.001


@final
class EngineDriver:
    """An engine whose calls must return in time.

    Attributes:
        engine: The engine itself, for callbacks on its own thread.
    """

    def __init__(self, engine: RolloutEngine, *, timeout_s: float, start_timeout_s: float) -> None:
        self.engine: Final = engine
        self._timeout_s: Final = timeout_s
        self._start_timeout_s: Final = start_timeout_s

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the engine, in time."""
        method = getattr(self.engine, name)
        return lambda *args, **kwargs: self._within(self._timeout_s, f"{name}()", lambda: method(*args, **kwargs))

    def start(self) -> None:
        """Start the engine."""
        self._within(self._start_timeout_s, "start()", self.engine.start)

    def pause(self, mode: PauseMode = "keep") -> None:
        """Pause the engine."""
        self._within(self._timeout_s, f"pause({mode!r})", lambda: self.engine.pause(mode))

    def results(self, handle: Handle) -> list[Generated]:
        """What came of a request.

        Raises:
            EngineError: The engine failed it.
        """
        name = handle.request.request_id
        try:
            return self._within(
                self._timeout_s + 1.0, f"result() of request {name!r}", lambda: handle.result(self._timeout_s)
            )
        except TimeoutError:
            fault(
                f"request {name!r} is not finished after {self._timeout_s:g} s; every request that enters must end, "
                "whatever happens to it. (A slow engine: raise timeout_s of the test class.)"
            )

    def generate(self, requests: Sequence[Request]) -> list[list[Generated]]:
        """What comes of requests that enter together."""
        return [self.results(handle) for handle in self.submit(requests)]

    def wait_for_units(self, units: int) -> None:
        """Wait until the engine has generated so many units since its start."""
        end = time.monotonic() + self._timeout_s
        while (made := self.stats().generated_units) < units:
            if time.monotonic() > end:
                fault(f"stats().generated_units stays at {made}; {units} units were asked for and more are in flight")
            time.sleep(_POLL_S)

    def pause_in_flight(self, handles: Sequence[Handle], units: int) -> int:
        """Pause once so many units were generated, while all requests are still unfinished; the units made by then."""
        self.wait_for_units(units)
        self.pause("keep")
        for handle in handles:
            if self.is_done(handle):
                fault("a request was finished before it could be paused; raise long_units of the test class")
        return int(self.stats().generated_units)

    def is_done(self, handle: Handle) -> bool:
        """Whether a request has ended."""
        what = f"result(0.0) of request {handle.request.request_id!r}"
        try:
            self._within(self._timeout_s, what, lambda: handle.result(0.0))
        except TimeoutError:
            return False
        except EngineError:
            return True
        return True

    def load(self, version: int, tensors: Mapping[str, torch.Tensor], cache: CachePolicy = "keep") -> str:
        """Load whole weights; returns the digest that the engine tells."""
        self.begin_update(version)
        self.write_all(tensors)
        return str(self.commit_update(cache))

    def write_all(self, tensors: Mapping[str, torch.Tensor], *, skip: int = 0) -> None:
        """Write every slice of the layout but the first `skip`."""
        for rank, held in self.layout().items():
            for piece, dtype in held[skip:]:
                box = slices.within(piece, slices.whole(piece.name, tuple(tensors[piece.name].shape)))
                self.write(rank, piece, tensors[piece.name][box].to(torch_dtype(dtype)).contiguous())

    def _within(self, timeout_s: float, what: str, call: Callable[[], T]) -> T:
        answer: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - it is raised again in the test
                answer.set_exception(error)

        threading.Thread(target=run, name=f"kit:{what}", daemon=True).start()
        done, _ = futures.wait([answer], timeout_s)
        if done:
            return answer.result()
        return fault(f"{what} did not return in {timeout_s:g} s; it must never wait for what cannot happen")


def refuses(error: type[CosmosError], call: Callable[[], object], what: str) -> str:
    """Check that the engine refuses a call with this error; returns its message.

    Args:
        error: What must be raised.
        call: The call.
        what: What is wrong with it, for the fault: "a request that ...".
    """
    try:
        call()
    except error as refusal:
        return str(refusal)
    except Exception as other:  # noqa: BLE001 - whatever it is, it is the fault
        fault(f"{what} raised {type(other).__name__} ({other}); raise {error.__name__} with what is wrong")
    return fault(f"{what} was accepted; raise {error.__name__}")
