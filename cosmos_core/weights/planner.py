"""Plans which source sends each slice to each rank, over whole pools: every element that a rank lacks, exactly once.

The nearest sources give, and among equally near ones loads are even (`balance`): no source that gives a part of
something has more to send than any other that could have given it as well, but for rounding (`division`).

A plan is a function of the facts alone, so that receivers can plan for themselves; what one of them asks for is
complete whatever others do. Ranks that hold the same are one kind, tensors that are split in the same way one
pattern: each is planned once. M: transfers; D: dims; S: holder sets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, Self

import attrs
import numpy as np

from cosmos_core.errors import WeightSyncError
from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices
from cosmos_core.weights.partition import Integers, Patterns, Table
from cosmos_core.weights.senders import Senders, Transfers, divide
from cosmos_core.weights.shards import ShardMap, TensorFacts, torch_dtype
from cosmos_core.weights.topology import Place, distances

GRAIN_BYTES: Final = 32 << 10
"""What several could send is divided among them in parts of about this size."""


@attrs.frozen(kw_only=True)
class Member:
    """A replica, or a process of one.

    Attributes:
        shards: The slices that its ranks have, or those that they lack.
        places: The place that each rank runs in; it is unknown for ranks that are left out.
    """

    shards: ShardMap
    places: Mapping[int, Place] = attrs.field(factory=dict)

    @classmethod
    def at(cls, place: Place, shards: ShardMap) -> Self:
        """Make a member whose ranks all run in one place."""
        return cls(shards=shards, places=dict.fromkeys(shards.ranks, place))


class Plan:
    """The source of each slice that each rank gets.

    Attributes:
        sources: (member, rank) of each source: a rank of a member.
        targets: (member, rank) of each target.
    """

    def __init__(self, sources: Sequence[Member], targets: Sequence[Member], *, grain_bytes: int = GRAIN_BYTES) -> None:
        """Plan for all targets; what several sources could send is divided into parts of about `grain_bytes`.

        A WeightSyncError names the first tensor, in the order of names, that no source holds, or holds with another
        shape or dtype, or of which a slice is not covered by the sources together.
        """
        check_agreement([each.shards for each in sources], [each.shards for each in targets])
        self.sources: Final = _ranks(sources)
        self.targets: Final = _ranks(targets)
        facts: dict[str, TensorFacts] = {}
        for each in targets:
            facts.update(each.shards.tensors)
        self.names: Final = sorted(facts)
        self._num_dims: Final = [len(facts[name].shape) for name in self.names]
        itemsizes = {dtype: torch_dtype(dtype).itemsize for dtype in {fact.dtype for fact in facts.values()}}
        self._itemsize: Final = np.array([itemsizes[facts[name].dtype] for name in self.names], np.int64)
        self._grain_bytes: Final = grain_bytes
        numbers = {name: number for number, name in enumerate(self.names)}
        held = Table.of(_pieces(sources), numbers, max([1, *self._num_dims]))
        wanted = Table.of(_pieces(targets), numbers, max([1, *self._num_dims]))
        self._patterns: Final = Patterns(held, wanted, self._itemsize.tolist(), grain_bytes)
        if self._patterns.uncovered is not None:
            raise _hole(self.names[self._patterns.uncovered], sources, targets)
        self._kind_of: Final = wanted.kind_of
        self._senders: Final = Senders(self._patterns, self._kind_of, distances(_places(sources), _places(targets)))

    def transfers(self, target: int) -> Transfers:
        """The transfers to a target: each element that it lacks, once."""
        lacking = self._patterns.kinds[int(self._kind_of[target])]
        patterns = [self._patterns.tensors[number] for number in lacking.pattern_C.tolist()]
        chunk_M = np.repeat(np.arange(len(patterns)), [len(tensors) for tensors in patterns])
        tensor_M = np.concatenate([np.zeros(0, np.int64), *patterns])
        demands, place_S = np.unique(self._senders.demands[target], return_inverse=True)
        place_M = place_S[lacking.set_C[chunk_M]]
        order = np.lexsort((tensor_M, place_M))
        chunk_M, tensor_M = chunk_M[order], tensor_M[order]
        size_MD = lacking.size_CD[chunk_M]
        whole = Transfers(
            source_M=place_M[order],
            tensor_M=tensor_M,
            origin_M=lacking.origin_C[chunk_M],
            first_MD=lacking.first_CD[chunk_M],
            size_MD=size_MD,
            nbytes_M=size_MD.prod(1) * self._itemsize[tensor_M],
        )
        senders = [self._senders.of_demand[demand] for demand in demands.tolist()]
        reach = [self._senders.reach[demand] for demand in demands.tolist()]
        return divide(whole, senders, reach, self._grain_bytes)

    def slices(self, target: int) -> dict[int, list[TensorSlice]]:
        """The slices that a target gets, by number of the source."""
        found = self.transfers(target)
        result: dict[int, list[TensorSlice]] = {}
        rows = zip(
            found.source_M.tolist(),
            found.tensor_M.tolist(),
            found.first_MD.tolist(),
            found.size_MD.tolist(),
            strict=True,
        )
        for source, tensor, first, size in rows:
            padding = len(first) - self._num_dims[tensor]
            piece = TensorSlice(name=self.names[tensor], start=tuple(first[padding:]), shape=tuple(size[padding:]))
            result.setdefault(source, []).append(piece)
        return result

    def loads(self) -> Integers:
        """Bytes that each source sends."""
        loads = np.zeros(len(self.sources), np.int64)
        for target in range(len(self.targets)):
            found = self.transfers(target)
            np.add.at(loads, found.source_M, found.nbytes_M)
        return loads


def check_agreement(
    sources: Sequence[ShardMap], targets: Sequence[ShardMap], *, published: Collection[str] | None = None
) -> None:
    """Check that every tensor of a target is held somewhere, and with its shape and dtype wherever it is.

    With `published`, each of these names must be wanted; without, sources may have more. A WeightSyncError names the
    first tensor, in the order of names, that breaks a rule.
    """
    held: dict[str, TensorFacts] = {}
    others: dict[str, TensorFacts] = {}
    for each in sources:
        for name, ours in each.tensors.items():
            known = held.setdefault(name, ours)
            if known is not ours and known != ours:
                others[name] = ours
    wanted: dict[str, TensorFacts] = {}
    for each in targets:
        for name, theirs in each.tensors.items():
            if held.get(name) != theirs:
                wanted[name] = theirs
            else:
                wanted.setdefault(name, theirs)
    wrong = {name for name, theirs in wanted.items() if held.get(name) != theirs or name in others}
    wrong |= set(published or ()) - wanted.keys()
    if wrong:
        name = min(wrong)
        is_other = name in others and held[name] == wanted.get(name)
        raise _disagreement(name, others[name] if is_other else held.get(name), wanted.get(name))


def _disagreement(name: str, ours: TensorFacts | None, theirs: TensorFacts | None) -> WeightSyncError:
    if theirs is None:
        return WeightSyncError(f"{name}: published, and the engine's layout lacks it")
    if ours is None:
        return WeightSyncError(f"{name}: the engine wants it, and no policy replica publishes it")
    return WeightSyncError(
        f"{name}: published as {ours.dtype} {ours.shape}, the engine holds {theirs.dtype} {theirs.shape}; "
        "`model` and `rollout.precision` must be the same on both sides"
    )


def _hole(name: str, sources: Sequence[Member], targets: Sequence[Member]) -> WeightSyncError:
    """The error that names a slice of a tensor which is wanted and not held."""
    held = [piece for pieces in _pieces(sources) for piece in pieces if piece.name == name]
    rest: list[TensorSlice] = []
    for wanted in (piece for pieces in _pieces(targets) for piece in pieces if piece.name == name):
        rest = [wanted]
        for other in held:
            rest = [part for piece in rest for part in slices.without(piece, other)]
        if rest:
            break
    return WeightSyncError(f"{name}: no policy replica holds the slice {rest[0].shape} at {rest[0].start}")


def _ranks(members: Sequence[Member]) -> list[tuple[int, int]]:
    return [(index, rank) for index, each in enumerate(members) for rank in each.shards.ranks]


def _pieces(members: Sequence[Member]) -> Iterator[Sequence[TensorSlice]]:
    return (pieces for each in members for pieces in each.shards.ranks.values())


def _places(members: Sequence[Member]) -> list[Place]:
    return [each.places.get(rank, Place()) for each in members for rank in each.shards.ranks]
