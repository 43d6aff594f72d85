"""A receiver's side of a lane: where the slices of each answer are found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.transport.addresses import address_towards
from cosmos_core.weights.lanes.pair import RECEIVER, Pair, meet
from cosmos_core.weights.lanes.tags import tag_of
from cosmos_core.weights.wire import PairKind


class Lane(Protocol):
    """How slices come from one publisher."""

    def expect(self, request: int, sizes: Sequence[int]) -> None:
        """Make ready for an answer, before it is asked for; `sizes` are the bytes of its slices."""
        ...

    def take(self, request: int, frames: Sequence[zmq.Frame]) -> list[torch.Tensor]:
        """The slices of an answer that has come, as bytes; `frames` came with it.

        Raises:
            TransportError: They do not come in time, or the lane is broken.
        """
        ...

    def close(self) -> None:
        """Leave; what is expected does not come any more."""
        ...


class FrameLane:
    """Slices follow the answer on the same socket."""

    def expect(self, request: int, sizes: Sequence[int]) -> None:
        """Nothing to do."""

    def take(self, request: int, frames: Sequence[zmq.Frame]) -> list[torch.Tensor]:  # noqa: ARG002
        """The frames' own memory."""
        return [_bytes(frame) for frame in frames]

    def close(self) -> None:
        """Nothing to do."""


class PairLane:
    """Slices come through a process group with the publisher.

    Transfers are begun before they are asked for, so that those of several publishers go on at the same time.

    Args:
        kind: The group's backend.
        host: The publisher's address.
        port: Where it waits for this receiver.
        stall_s: Longest wait for the publisher to appear, and for the slices of an answer.

    Raises:
        TransportError: The publisher cannot be met.
    """

    def __init__(self, kind: PairKind, host: str, port: int, stall_s: float) -> None:
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


def _bytes(frame: zmq.Frame) -> torch.Tensor:
    if not len(frame):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(frame.buffer, dtype=torch.uint8)
