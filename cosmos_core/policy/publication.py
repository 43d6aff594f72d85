"""Publishes weight versions: the snapshot on the training thread, its digest and announcement on another.

Each process of a replica publishes what it holds, and those that hold the same divide it. The digest that all of them
announce is the sum of theirs, hence the one that a single process would announce.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType

import attrs
import msgspec
import torch

from cosmos_core.errors import WeightSyncError
from cosmos_core.models.parallel.channel import Channel
from cosmos_core.protocols.quantization import Format
from cosmos_core.transport.reports import WeightsPublished
from cosmos_core.weights.digest import add_digests
from cosmos_core.weights.publisher import WeightPublisher
from cosmos_core.weights.quantization import matrix_shares
from cosmos_core.weights.shards import Merge, local_shards, owned
from cosmos_core.weights.snapshot import Snapshot


@attrs.frozen(kw_only=True)
class _Part:
    """One process's part of a version; `problem` says why it cannot be published, if it cannot."""

    digests: dict[str, int]
    nbytes: int
    problem: str


@attrs.define(eq=False)
class Publications:
    """The versions that this process publishes.

    Attributes:
        publisher: Holds and serves the snapshots.
        dtype: The rollout replicas' precision.
        report: Told of each version once it can be read everywhere, on the background thread of the leader.
        channel: Between the processes of the replica, for the background thread alone.
        form: The format in which rollout replicas hold matrices; None for the others' precision.
        matrices: Shape of each matrix by canonical name (`ModelFacts.matrices`).
        exchange: Gives what each process of the replica says to all of them, in the order of ranks, on the training
            thread.
        newest: Newest version published or about to be; -1 before the first.
    """

    _publisher: WeightPublisher
    _dtype: torch.dtype
    _report: Callable[[WeightsPublished], None]
    _channel: Channel = attrs.field(factory=Channel)
    _form: Format | None = attrs.field(default=None, kw_only=True)
    _matrices: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict, kw_only=True)
    _exchange: Callable[[bytes], Sequence[bytes]] = attrs.field(default=lambda said: [said], kw_only=True)
    newest: int = attrs.field(default=-1, init=False)
    _thread: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1, "publication"), init=False)
    _sealing: list[Future[None]] = attrs.field(factory=list, init=False)
    _owned: frozenset[str] | None = attrs.field(default=None, init=False)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], merges: Mapping[str, Merge] = MappingProxyType({})
    ) -> None:
        """Have the weights copied; they may change after `staging.settle`. All processes of the replica call it.

        Args:
            version: Of the weights.
            tensors: By canonical name; `DTensor`s where they are spread.
            merges: What is to be added to some of them, one at a time.

        Raises:
            WeightSyncError: There is no room for the copy, an earlier publication failed, the weights are spread in a
                way that cannot be published, or they cannot be quantised. What only one process cannot quantise is
                raised in all of them, by its name; weights that are not finite on a GPU, at the next publication.
        """
        self.check()
        shares = local_shards(tensors, merges)
        if self._owned is None:
            # Who holds what is the same at every version. The thread owns the channel, hence asks.
            rank, exchange = self._channel.rank, self._channel.exchange
            self._owned = self._thread.submit(owned, shares, rank, exchange).result()
        mine = {name: share for name, share in shares.items() if name in self._owned}
        # Those who publish nothing of a tensor still take part: scales may span what several processes hold.
        quantised = {} if self._form is None else matrix_shares(self._form, tensors, self._matrices, merges)
        snapshot = self._agreed(lambda: self._publisher.stage(version, mine, self._dtype, quantised=quantised))
        self.newest = version
        self._sealing.append(self._thread.submit(self._seal, snapshot))

    def retain(self, oldest: int) -> None:
        """Drop versions before `oldest`."""
        self._publisher.retain(oldest)

    def check(self) -> None:
        """Raise what a publication in the background raised.

        Raises:
            CosmosError: It failed.
        """
        for done in [future for future in self._sealing if future.done()]:
            self._sealing.remove(done)
            done.result()

    def close(self) -> None:
        """Wait until everything published is announced."""
        self._thread.shutdown(wait=True)
        self.check()

    def _agreed(self, stage: Callable[[], Snapshot]) -> Snapshot:
        """Call `stage`; if it fails in one process, all of them raise the same."""
        if self._form is None:
            return stage()
        snapshot, problem = None, ""
        try:
            snapshot = stage()
        except WeightSyncError as error:
            problem = str(error)
        _refuse([each.decode() for each in self._exchange(problem.encode())])
        assert snapshot is not None
        return snapshot

    def _seal(self, snapshot: Snapshot) -> None:
        part = _Part(digests=snapshot.digests(), nbytes=snapshot.nbytes, problem=snapshot.problem())
        said = self._channel.exchange(msgspec.msgpack.encode(part))
        parts = [msgspec.msgpack.decode(each, type=_Part) for each in said]
        _refuse([each.problem for each in parts])
        published = self._publisher.seal(snapshot, digests=add_digests(each.digests for each in parts))
        # Every process serves it before anybody is told.
        self._channel.exchange(b"")
        if self._channel.is_leader:
            self._report(attrs.evolve(published, nbytes=sum(each.nbytes for each in parts)))


def _refuse(problems: Sequence[str]) -> None:
    """Raise the problems of a replica's processes, if there are any; empty ones are none."""
    if any(problems):
        told = [f"process {rank}: {each}" if len(problems) > 1 else each for rank, each in enumerate(problems) if each]
        raise WeightSyncError("; ".join(told))
