"""One fetch under way: slices asked of several publishers, and of others when one fails.

A `WeightSyncError` says that no source can give what is missing, and names the problem of each.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import attrs
import torch
import zmq

from cosmos_core.errors import TransportError, WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.transport.addresses import without_key
from cosmos_core.weights import digest, slices, wire
from cosmos_core.weights.planner import Member, Plan
from cosmos_core.weights.shards import ShardMap
from cosmos_core.weights.snapshot import view
from cosmos_core.weights.source import Arrived, Source, Wanted
from cosmos_core.weights.topology import Place

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


_LOGGER: Final = logging.getLogger(__name__)
_POLL_MS: Final = 50


@attrs.frozen(kw_only=True, eq=False)
class Ready:
    """A source that has the version.

    Attributes:
        source: Who is asked for slices; None for what is only read.
        read: Reads what it holds, if that is within reach.
    """

    source: Source | None
    manifest: wire.Manifest
    shards: ShardMap
    read: Read | None


class Fetch:
    """The slices of one version, to be iterated once: (rank, slice, data); data lives as long as it is referenced.

    It may take as long as it needs: a source that is silent for `stall_s` is given up, and the fetch without any left.

    Attributes:
        digests: Digest of each tensor as published; see `first_difference`.
        is_stored: Whether it is read from where versions are stored, and from no process.
        is_asked: Whether processes send some of it.
    """

    def __init__(
        self,
        version: int,
        wanted: ShardMap,
        ready: Sequence[Ready],
        plan: Plan,
        *,
        place: Place,
        stall_s: float,
        ranks: Collection[int],
    ) -> None:
        self._sources: Final = [each.source for each in ready if each.source is not None]
        self.version: Final = version
        self.digests: Final[Mapping[str, int]] = ready[0].manifest.digests
        self.is_stored: Final = not self._sources
        self.is_asked: Final = any(each.read is None for each in ready)
        self._wanted: Final = wanted
        self._ready: Final = tuple(ready)
        self._plan: Final = plan
        self._place: Final = place
        self._stall_s: Final = stall_s
        self._ranks: Final = ranks

    @property
    def spared(self) -> int:
        """Bytes that did not come so far, as only what changed did."""
        return sum(source.spared for source in self._sources)

    @property
    def num_whole(self) -> int:
        """Answers so far that came whole, as their sources did not have the base."""
        return sum(source.num_whole for source in self._sources)

    def first_difference(self, loaded: Mapping[str, torch.Tensor]) -> str | None:
        """The first tensor, by name, that is not loaded as it was published; None if all are."""
        return digest.first_difference(self.digests, digest.tensor_digests(loaded))

    def __iter__(self) -> Iterator[Arrived]:
        """Yield every slice of the chosen ranks once."""
        yield from self._assign(self._ready, self._plan)
        while busy := [source for source in self._sources if source.is_busy]:
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
        """Ask the other sources for what one owes."""
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
    """Who of these sources sends what to the ranks of a replica in a place."""
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
    """What is wrong with each source that failed."""
    failed = [source for source in sources if source.failure]
    is_gone = bool(failed) and all(source.held is not None for source in failed)
    what = "is gone" if is_gone else "cannot be fetched"
    return f"weights version {version} {what}: " + "; ".join(f"{without_key(s.endpoint)}: {s.failure}" for s in failed)
