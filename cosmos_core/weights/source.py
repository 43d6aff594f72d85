"""A receiver's connection to one publisher: requests out, slices in.

It waits for nothing but slices that the publisher has announced on a process group, and that for a bounded time. A
`TransportError` says that the publisher refuses this process or cannot give what is wanted, or that an answer is
malformed.
"""

from __future__ import annotations

import collections
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch
import zmq

from cosmos_core.errors import TransportError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport import sockets
from cosmos_core.transport.addresses import host_of, without_key
from cosmos_core.transport.authentication import Keyring, reach
from cosmos_core.transport.sockets import HANDSHAKE_EVENTS, Handshakes
from cosmos_core.weights import slices, wire
from cosmos_core.weights.changes import Encoding, decode
from cosmos_core.weights.process_group_transport import FrameTransport, ProcessGroupTransport
from cosmos_core.weights.shards import TensorFacts, torch_dtype
from cosmos_core.weights.snapshot import Base
from cosmos_core.weights.topology import Place

Wanted: TypeAlias = tuple[int, TensorSlice]
"""A target rank and a slice for it."""
Arrived: TypeAlias = tuple[int, TensorSlice, torch.Tensor]

_LINGER_MS: Final = 200
"""How long a last word may take to leave this process."""


class Source:
    """One publisher, as one fetch sees it.

    Attributes:
        manifest: What it said of the version; None until it answered.
        held: Versions it holds, if it answered that the wanted one is gone.
        failure: Why it is not used any more; empty while it is.
        spared: Bytes of slices that did not come, as only changes did.
        num_whole: Answers that came whole, as the publisher did not have the base.
    """

    def __init__(
        self,
        context: sockets.Context,
        endpoint: str,
        place: Place,
        run_id: str,
        *,
        network: wire.Network,
        stall_s: float,
        base: Base | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        """Connect; `base` is what the receiver has already, if changes of it are enough."""
        self.endpoint: Final = endpoint
        self.place: Final = place
        self.manifest: wire.Manifest | None = None
        self.held: tuple[int, ...] | None = None
        self.failure = ""
        self.socket: Final = reach(
            keyring, context, endpoint, uuid.uuid4().bytes, sockets.BULK, queued=True, events=HANDSHAKE_EVENTS
        )
        self._handshakes: Final = Handshakes(self.socket, without_key(endpoint))
        self._queue: Final[collections.deque[list[Wanted]]] = collections.deque()
        self._asked: Final[dict[int, list[Wanted]]] = {}
        self._facts: dict[str, TensorFacts] = {}
        self._next_request = 0
        self._progress = time.monotonic()
        self._run_id: Final = run_id
        self._kind: Final[wire.Network] = network
        self._stall_s: Final = stall_s
        self._transport: FrameTransport | None = FrameTransport() if network == "zmq" else None
        self._opening = -1
        self._base: Final = base if network == "zmq" else None
        # As it is now: what arrives is written into the same copy.
        self._origin: Final = None if self._base is None else self._base.origin
        self._told: Final[set[int]] = set()
        self.spared = 0
        self.num_whole = 0

    def describe(self, version: int) -> None:
        """Ask for the manifest of a version."""
        self._send(wire.Describe(request=self._number(), run_id=self._run_id, version=version))

    def want(self, pieces: Iterable[Wanted]) -> None:
        """Queue slices to read; the manifest must be there."""
        assert self.manifest is not None
        self._facts = {entry.name: entry.facts for entry in self.manifest.entries}
        if not self._asked:
            self._progress = time.monotonic()
        for batch in _batches(pieces, self._facts):
            self._queue.append(batch)
        if self._transport is not None:
            self._ask()
        elif self._queue and self._kind != "zmq" and self._opening < 0:
            self._opening = self._number()
            self._send(wire.Open(request=self._opening, run_id=self._run_id, backend=self._kind))

    @property
    def readable(self) -> tuple[sockets.Socket, ...]:
        """Sockets that are readable when there is something to `take`."""
        return self.socket, self._handshakes.monitor

    @property
    def is_busy(self) -> bool:
        """Whether slices are still to come."""
        return bool(self._asked or self._queue)

    @property
    def silent_s(self) -> float:
        """Seconds since it last answered, or since it was asked."""
        return time.monotonic() - self._progress

    @property
    def is_stalled(self) -> bool:
        """Whether it has not answered for too long; an answer that nobody looked at yet counts."""
        return self.silent_s > self._stall_s and not self.socket.poll(0)

    def fail(self, reason: str) -> list[Wanted]:
        """Use it no more; returns what it still owes."""
        self.failure = reason
        owed = [wanted for batch in (*self._asked.values(), *self._queue) for wanted in batch]
        self._asked.clear()
        self._queue.clear()
        self.close()
        return owed

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self.socket.closed:
            return
        self._handshakes.close()
        if self._opening < 0:
            self.socket.close()
            return
        self._send(wire.Leave(request=self._number()))
        self.socket.close(linger=_LINGER_MS)
        if self._transport is not None:
            self._transport.close()

    def take(self) -> list[Arrived]:
        """Process one answer, if there is one; slices of it are returned."""
        self._handshakes.check()
        try:
            frames = sockets.receive_frames(self.socket, wire.REQUEST_SLICES + 1)
        except zmq.Again:
            return []
        self._progress = time.monotonic()
        answer = wire.CODEC.decode(frames[0].buffer)
        if isinstance(answer, wire.Described):
            self.manifest = answer.manifest
            return []
        if isinstance(answer, wire.Gone):
            self.held = answer.held
            raise TransportError(f"it holds only the versions {', '.join(map(str, answer.held)) or '(none)'}")
        if isinstance(answer, wire.Denied):
            raise TransportError(answer.reason)
        if isinstance(answer, wire.Opened) and answer.request == self._opening and self._transport is None:
            self._join(answer.port)
            return []
        if not isinstance(answer, wire.Slices) or self._transport is None or answer.request not in self._asked:
            raise TransportError(f"an answer to nothing that was asked: {answer}")
        batch = self._asked[answer.request]
        arrived = self._tensors(batch, self._transport.take(answer.request, frames[1:]), answer)
        self._progress = time.monotonic()
        del self._asked[answer.request]
        self._ask()
        return arrived

    def _join(self, port: int) -> None:
        """Join the process group that the publisher opened."""
        assert self._kind != "zmq"
        self._transport = ProcessGroupTransport(self._kind, host_of(self.endpoint), port, self._stall_s)
        self._progress = time.monotonic()
        self._ask()

    def _tensors(self, batch: Sequence[Wanted], came: Sequence[torch.Tensor], answer: wire.Slices) -> list[Arrived]:
        if len(came) != len(batch):
            raise TransportError(f"{len(came)} slices instead of {len(batch)}")
        encodings: Sequence[Encoding] = answer.encodings or ["whole"] * len(batch)
        if len(encodings) != len(batch):
            raise TransportError(f"{len(encodings)} encodings of {len(batch)} slices")
        has_base = answer.request in self._told
        self._told.discard(answer.request)
        self.num_whole += has_base and not answer.encodings
        arrived = []
        for (rank, piece), flat, encoding in zip(batch, came, encodings, strict=True):
            if encoding != "whole" and not has_base:
                raise TransportError(f"{piece.name}: changes as {encoding!r}, and no base was named")
            whole = flat if encoding == "whole" else self._made(piece, encoding, flat)
            arrived.append((rank, piece, _tensor(piece, self._facts[piece.name], whole)))
        return arrived

    def _made(self, piece: TensorSlice, encoding: Encoding, changes: torch.Tensor) -> torch.Tensor:
        """The bytes of a slice, of what is here and what changed."""
        assert self._base is not None
        itemsize = self._facts[piece.name].itemsize
        made = decode(piece.name, encoding, changes.numpy(), self._base.read(piece), itemsize)
        self.spared += len(made) - changes.numel()
        return torch.from_numpy(made)

    def _ask(self) -> None:
        assert self.manifest is not None
        assert self._transport is not None
        while self._queue and len(self._asked) < wire.WINDOW:
            batch = self._queue.popleft()
            number = self._number()
            self._asked[number] = batch
            pieces = tuple(piece for _, piece in batch)
            self._transport.expect(number, [slices.size(piece) * self._facts[piece.name].itemsize for piece in pieces])
            base = self._origin_of(pieces)
            if base is not None:
                self._told.add(number)
            self._send(wire.Read(request=number, token=self.manifest.token, pieces=pieces, base=base))

    def _origin_of(self, pieces: Sequence[TensorSlice]) -> wire.Origin | None:
        """The version of which these slices are here; None if not all are, as they are published now."""
        base = self._base
        if base is None or not all(base.holds(piece, self._facts[piece.name]) for piece in pieces):
            return None
        return self._origin

    def _number(self) -> int:
        self._next_request += 1
        return self._next_request

    def _send(self, request: wire.Describe | wire.Open | wire.Read | wire.Leave) -> None:
        sockets.offer(self.socket, [wire.CODEC.encode(request)])


def _batches(pieces: Iterable[Wanted], facts: dict[str, TensorFacts]) -> Iterable[list[Wanted]]:
    """Requests of bounded size, for slices of bounded size."""
    batch: list[Wanted] = []
    nbytes = 0
    for rank, piece in pieces:
        itemsize = facts[piece.name].itemsize
        for chunk in slices.chunks(piece, max(1, wire.SLICE_BYTES // itemsize)):
            more = slices.size(chunk) * itemsize
            if batch and (nbytes + more > wire.REQUEST_BYTES or len(batch) == wire.REQUEST_SLICES):
                yield batch
                batch, nbytes = [], 0
            batch.append((rank, chunk))
            nbytes += more
    if batch:
        yield batch


def _tensor(piece: TensorSlice, facts: TensorFacts, flat: torch.Tensor) -> torch.Tensor:
    dtype, count = torch_dtype(facts.dtype), math.prod(piece.shape)
    if flat.numel() != count * facts.itemsize:
        raise TransportError(f"{piece.name}: {flat.numel():,} bytes for a slice of {count * facts.itemsize:,}")
    # A small frame lies anywhere in the socket's read buffer, where a vector load could fault on some machines.
    aligned = flat if flat.data_ptr() % facts.itemsize == 0 else flat.clone()
    return aligned.view(dtype).view(piece.shape)
