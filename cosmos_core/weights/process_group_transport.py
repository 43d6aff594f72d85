"""Slices of an answer on their way from a publisher to a receiver: as frames, or through a process group of the two.

Requests and answers always travel over ZeroMQ, so that the planner, the window, deadlines and the turn to other
publishers are the same for every transport. A `TransportError` says that the other side does not appear, take or send
in time.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.transport.addresses import address_towards
from cosmos_core.weights.process_group import PUBLISHER, RECEIVER, Pair, Rendezvous, meet, tag_of
from cosmos_core.weights.wire import Backend


class FrameTransport:
    """Brings the slices of one publisher, which follow its answer on the same socket."""

    def expect(self, request: int, sizes: Sequence[int]) -> None:
        """Make ready for an answer, before it is asked for; `sizes` are the bytes of its slices."""

    def take(self, request: int, frames: Sequence[zmq.Frame]) -> list[torch.Tensor]:  # noqa: ARG002
        """The slices of an answer that has come, as bytes; `frames` came with it, and theirs is the memory."""
        return [
            torch.frombuffer(frame.buffer, dtype=torch.uint8) if len(frame) else torch.empty(0, dtype=torch.uint8)
            for frame in frames
        ]

    def close(self) -> None:
        """Leave; what is expected does not come any more."""


class ProcessGroupTransport(FrameTransport):
    """Brings slices through a process group with the publisher, which waits at `host` and `port` for this receiver.

    Transfers are begun before they are asked for, so that those of several publishers go on at the same time.
    """

    def __init__(self, kind: Backend, host: str, port: int, stall_s: float) -> None:
        store = meet(host, port, stall_s)
        self._stall_s: Final = stall_s
        self._pair: Final = Pair(kind, store, RECEIVER, host=address_towards(host), timeout_s=stall_s)
        self._expected: Final[dict[int, list[tuple[torch.Tensor, dist.Work | None]]]] = {}
        self._failure: TransportError | None = None

    def expect(self, request: int, sizes: Sequence[int]) -> None:
        """Begin to receive; if the connection is broken, or the GPU is full, `take` tells."""
        expected = self._expected.setdefault(request, [])
        try:
            for index, size in enumerate(sizes):
                data = self._pair.room(size)
                expected.append((data, self._pair.receive(data, tag_of(request, index)) if size else None))
        except TransportError as error:
            self._failure = error

    def take(self, request: int, frames: Sequence[zmq.Frame]) -> list[torch.Tensor]:
        """Wait until all of it is there."""
        if frames:
            raise TransportError(f"{len(frames)} slices as frames, and {self._pair.kind} was agreed")
        if self._failure is not None:
            raise self._failure
        for _, work in self._expected[request]:
            if work is not None:
                self._pair.finish(work, self._stall_s)
        return [data for data, _ in self._expected.pop(request)]

    def close(self) -> None:
        """Leave, whatever is under way."""
        self._pair.drop([work for each in self._expected.values() for _, work in each if work is not None])
        self._expected.clear()


_LOGGER: Final = logging.getLogger(__name__)

FORM_S: Final = 30.0
"""Longest wait for a receiver to appear."""
SEND_S: Final = 30.0
"""Longest wait for a receiver to take a slice; one that takes longer is given up."""
IDLE_S: Final = 330.0
"""How long a receiver may ask for nothing before it counts as gone without a word: longer than a fetch may take."""

_Answer: TypeAlias = tuple[int, Sequence[memoryview]]


class Sender:
    """Sends answers to one receiver, met at `port`. The server that feeds it never waits for it."""

    def __init__(self, kind: Backend, host: str) -> None:
        self._kind: Final[Backend] = kind
        self._host: Final = host
        self._meeting: Rendezvous | None = Rendezvous(host, FORM_S)
        self.port: Final = self._meeting.port
        self._answers: Final[queue.SimpleQueue[_Answer | None]] = queue.SimpleQueue()
        self._lock: Final = threading.Lock()
        self._why_ended = ""
        self._thread: Final = threading.Thread(target=self._run, name=f"weights-{kind}", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """Whether it sends nothing any more."""
        return not self._thread.is_alive()

    def send(self, request: int, slices: Sequence[memoryview]) -> None:
        """Queue the slices that answer a request; their memory must stay as it is until they are sent."""
        with self._lock:
            if self._why_ended:
                raise TransportError(self._why_ended)
            self._answers.put((request, slices))

    def close(self) -> None:
        """End once what is queued is sent; returns at once. Idempotent."""
        self._answers.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end; a receiver that does not take what it asked for cannot hold it up for longer."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        meeting, self._meeting = self._meeting, None
        assert meeting is not None
        try:
            pair = Pair(self._kind, meeting.store, PUBLISHER, host=self._host, timeout_s=FORM_S)
            while (answer := self._next()) is not None:
                _send(pair, *answer)
        except TransportError as error:
            _LOGGER.warning("a receiver of weights over %s was given up: %s", self._kind, error)
            with self._lock:
                self._why_ended = f"the connection over {self._kind} was given up: {error}"

    def _next(self) -> _Answer | None:
        """What to send next; None at the end."""
        try:
            return self._answers.get(timeout=IDLE_S)
        except queue.Empty:
            with self._lock:
                if not self._answers.empty():
                    return self._answers.get()
                self._why_ended = f"it was asked for nothing over {self._kind} for {IDLE_S:g} s"
        _LOGGER.info("a receiver of weights over %s asked for nothing for %g s", self._kind, IDLE_S)
        return None


def _send(pair: Pair, request: int, slices: Sequence[memoryview]) -> None:
    works = []
    try:
        for index, data in enumerate(slices):
            if len(data):
                content = pair.placed(torch.frombuffer(data, dtype=torch.uint8))
                # Held until it is sent.
                works.append((pair.send(content, tag_of(request, index)), content))
        while works:
            pair.finish(works[0][0], SEND_S)
            works.pop(0)
    except TransportError:
        pair.drop([work for work, _ in works])
        raise
