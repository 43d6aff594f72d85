"""Fetches one version: asks several publishers for slices, and other ones when one fails.

A `WeightSyncError` says that no source can give what is missing, and names the problem of each; a `TransportError` says
that one refuses this process or cannot give what is wanted, or that its answer is malformed. A source waits for nothing
but slices that its publisher has announced on a process group, and that for a bounded time.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import mmap
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Final, TypeAlias

import attrs
import torch
import zmq

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport import sockets
from cosmos_core.transport.addresses import host_of, without_key
from cosmos_core.transport.authentication import Keyring, reach
from cosmos_core.transport.sockets import HANDSHAKE_EVENTS, Handshakes
from cosmos_core.weights import slices, wire
from cosmos_core.weights.changes import Encoding, decode
from cosmos_core.weights.planner import Member, Plan
from cosmos_core.weights.process_group import FrameTransport, ProcessGroupTransport
from cosmos_core.weights.shards import ShardMap, TensorFacts, torch_dtype
from cosmos_core.weights.snapshot import Base, view
from cosmos_core.weights.topology import Place

_LOGGER: Final = logging.getLogger(__name__)
_POLL_MS: Final = 50
_LINGER_MS: Final = 200
"""How long a last word may take to leave this process."""

Wanted: TypeAlias = tuple[int, TensorSlice]
"""A target rank and a slice for it."""
Arrived: TypeAlias = tuple[int, TensorSlice, torch.Tensor]


class Source:
    """A connection to one publisher, as one fetch sees it: requests out, slices in.

    Attributes:
        manifest: The publisher's description of the version; None until it answered.
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
        base: Base | None,
        keyring: Keyring | None,
        pairs: MutableMapping[str, ProcessGroupTransport],
        receiver: str,
    ) -> None:
        """Connect, for the receiver of this name.

        `base` is what the receiver has already, if changes of it are enough. `pairs` are process groups of earlier
        fetches by endpoint: one goes on here, and is put back once it has done all that it was asked for.
        """
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
        self._pairs: Final = pairs
        self._receiver: Final = receiver
        self._former: ProcessGroupTransport | None = None
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
            self._former = self._pairs.pop(self.endpoint, None)
            opening = wire.Open(
                request=self._opening,
                run_id=self._run_id,
                backend=self._kind,
                pair="" if self._former is None else self._former.name,
                receiver=self._receiver,
            )
            self._send(opening)

    @property
    def readable(self) -> tuple[sockets.Socket, ...]:
        """Sockets that are readable when there is something to `take`."""
        return self.socket, self._handshakes.monitor

    @property
    def is_busy(self) -> bool:
        """True while slices are still to come."""
        return bool(self._asked or self._queue)

    @property
    def silent_s(self) -> float:
        """Seconds since it last answered, or since it was asked."""
        return time.monotonic() - self._progress

    @property
    def is_stalled(self) -> bool:
        """True if the publisher has not answered for too long; an answer that was not read yet counts."""
        return self.silent_s > self._stall_s and not self.socket.poll(0)

    def fail(self, reason: str) -> list[Wanted]:
        """Stop using the publisher, and return the slices that it still owes."""
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
        transport = self._transport
        keep = isinstance(transport, ProcessGroupTransport) and transport.is_idle and not self.failure
        self._send(wire.Leave(request=self._number(), keep=keep))
        self.socket.close(linger=_LINGER_MS)
        if keep and isinstance(transport, ProcessGroupTransport):
            self._pairs[self.endpoint] = transport
        elif transport is not None:
            transport.close()
        if self._former is not None:
            self._former.close()

    def take(self) -> list[Arrived]:
        """Process one answer, if there is one, and return its slices."""
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
            self._transport = self._paired(answer)
            self._progress = time.monotonic()
            self._ask()
            return []
        if not isinstance(answer, wire.Slices) or self._transport is None or answer.request not in self._asked:
            raise TransportError(f"an answer to nothing that was asked: {answer}")
        batch = self._asked[answer.request]
        arrived = self._tensors(batch, self._transport.take(answer.request, frames[1:]), answer)
        self._progress = time.monotonic()
        del self._asked[answer.request]
        self._ask()
        return arrived

    def _paired(self, answer: wire.Opened) -> ProcessGroupTransport:
        """The process group that goes on, or a new one, for which the publisher waits."""
        assert self._kind != "zmq"
        former, self._former = self._former, None
        if answer.port == 0 and former is not None and former.name == answer.pair:
            former.stall_s = self._stall_s
            return former
        if former is not None:
            former.close()
        return ProcessGroupTransport(self._kind, host_of(self.endpoint), answer.port, self._stall_s, answer.pair)

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
        """The bytes of a slice, made from the receiver's base and the changes that came."""
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
        """The version of the receiver's base; None unless it has all these slices, with published dtypes and shapes."""
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


Read: TypeAlias = Callable[[Sequence[Wanted]], Iterator[Arrived]]
"""Yields slices within reach; a `WeightSyncError` says that they are damaged or gone."""


def read_mapped(manifest: wire.Manifest, buffer: mmap.mmap, pieces: Sequence[Wanted]) -> Iterator[Arrived]:
    """Yield slices of a publisher's file on this host: views of the mapping, which live as long as it does."""
    tensors: dict[str, list[tuple[TensorSlice, torch.Tensor]]] = {}
    for entry in manifest.entries:
        tensors.setdefault(entry.name, []).append((entry.piece, view(buffer, entry)))
    for rank, piece in pieces:
        held, tensor = next((h, t) for h, t in tensors[piece.name] if slices.contains(h, piece))
        yield rank, piece, tensor[slices.within(piece, held)]


@attrs.frozen(kw_only=True, eq=False)
class Ready:
    """A source that has the version.

    Attributes:
        source: The publisher to ask for slices; None for parts that are only read.
        read: Reads what it holds, if that is within reach.
    """

    source: Source | None
    manifest: wire.Manifest
    shards: ShardMap
    read: Read | None


@attrs.frozen(kw_only=True, eq=False)
class Fetch:
    """The slices of one version, to be iterated once: (rank, slice, data); data lives as long as it is referenced.

    It may take as long as it needs: a source that is silent for `stall_s` is given up, and the fetch without any left.
    """

    version: int
    _wanted: ShardMap
    _ready: Sequence[Ready]
    _plan: Plan
    _place: Place
    _stall_s: float
    _ranks: Collection[int]
    _interrupted: Callable[[], bool]

    @functools.cached_property
    def _sources(self) -> list[Source]:
        return [each.source for each in self._ready if each.source is not None]

    @property
    def digests(self) -> Mapping[str, int]:
        """Digest of each tensor as published."""
        return self._ready[0].manifest.digests

    @property
    def is_stored(self) -> bool:
        """True if it is read from where versions are stored, and from no process."""
        return not self._sources

    @property
    def is_asked(self) -> bool:
        """True if processes send some of it."""
        return any(each.read is None for each in self._ready)

    @property
    def spared(self) -> int:
        """Bytes that were not sent so far, as only changes were."""
        return sum(source.spared for source in self._sources)

    @property
    def num_whole(self) -> int:
        """Answers so far that came whole, as their sources did not have the base."""
        return sum(source.num_whole for source in self._sources)

    def __iter__(self) -> Iterator[Arrived]:
        """Yield every slice of the chosen ranks once, unless it is interrupted."""
        yield from self._assign(self._ready, self._plan)
        while (busy := [source for source in self._sources if source.is_busy]) and not self._interrupted():
            answered = wait(busy)
            for source in answered:
                try:
                    arrived = source.take()
                except TransportError as error:
                    yield from self._reassign(source, str(error))
                else:
                    yield from arrived
            for source in busy:
                if source not in answered and source.is_busy and source.is_stalled:
                    yield from self._reassign(source, f"no answer for {self._stall_s:g} s")

    def _assign(self, usable: Sequence[Ready], plan: Plan) -> Iterator[Arrived]:
        """Ask for slices over the network, then yield those within reach."""
        shares: list[list[Wanted]] = [[] for _ in usable]
        for target, rank in ((number, rank) for number, (_, rank) in enumerate(plan.targets) if rank in self._ranks):
            for index, pieces in plan.slices(target).items():
                shares[index] += [(rank, piece) for piece in pieces]
        for ready, share in zip(usable, shares, strict=True):
            if ready.read is None and ready.source is not None:
                ready.source.want(share)
        for ready, share in zip(usable, shares, strict=True):
            if ready.read is not None:
                yield from ready.read(share)

    def _reassign(self, source: Source, reason: str) -> Iterator[Arrived]:
        """Ask the other sources for the slices that a failed one owes."""
        owed = source.fail(reason)
        _LOGGER.warning("weights version %d: %s failed: %s", self.version, source.endpoint, reason)
        alive = [each for each in self._sources if not each.failure]
        if not alive:
            raise WeightSyncError(problems(self.version, self._sources))
        ranks: dict[int, list[TensorSlice]] = {}
        for rank, piece in owed:
            ranks.setdefault(rank, []).append(piece)
        tensors = {piece.name: self._wanted.tensors[piece.name] for _, piece in owed}
        rest = ShardMap(tensors=tensors, ranks={rank: tuple(pieces) for rank, pieces in ranks.items()})
        usable = [ready for ready in self._ready if ready.source in alive]
        try:
            yield from self._assign(usable, plan_of(usable, rest, self._place))
        except WeightSyncError as error:
            raise WeightSyncError(f"{problems(self.version, self._sources)}; {error}") from None


def plan_of(ready: Sequence[Ready], wanted: ShardMap, place: Place) -> Plan:
    """Plan which of these sources sends each slice to the ranks of a replica that runs in `place`."""
    sources = [Member.at(Place() if each.source is None else each.source.place, each.shards) for each in ready]
    return Plan(sources, [Member.at(place, wanted)])


def wait(sources: Sequence[Source]) -> list[Source]:
    """Sources from which something can be read, after waiting a moment for the first."""
    if not sources:
        return []
    poller = zmq.Poller()
    by_socket = {socket: source for source in sources for socket in source.readable}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    return list(dict.fromkeys(by_socket[socket] for socket, _ in poller.poll(_POLL_MS)))


def problems(version: int, sources: Sequence[Source]) -> str:
    """A message that says why each failed source failed."""
    failed = [source for source in sources if source.failure]
    is_gone = bool(failed) and all(source.held is not None for source in failed)
    what = "is gone" if is_gone else "cannot be fetched"
    return f"weights version {version} {what}: " + "; ".join(f"{without_key(s.endpoint)}: {s.failure}" for s in failed)
