"""Cuts the wanted part of a tensor into chunks, each of which certain sources hold as a whole.

S: shards of sources; T: shards that are wanted; C: chunks; D: dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Self, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.protocols import TensorSlice
from cosmos_core.weights import slices

Integers: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True, eq=False)
class Table:
    """The shards of some ranks, those of equal ranks once.

    Attributes:
        kind_of: The kind of each rank: ranks of one kind hold the same.
        tensor_B: Number of the tensor.
        kind_B: Kind of the ranks that hold the shard.
    """

    kind_of: Integers
    tensor_B: Integers
    kind_B: Integers
    first_BD: Integers
    end_BD: Integers

    @classmethod
    def of(cls, ranks: Iterable[Sequence[TensorSlice]], numbers: Mapping[str, int], num_dims: int) -> Self:
        """Make the table of the slices that each rank holds, without empty ones and tensors that `numbers` lacks."""
        kinds: dict[tuple[TensorSlice, ...], int] = {}
        kind_of = [kinds.setdefault(tuple(held), len(kinds)) for held in ranks]
        # Per number of dims, as rows of one array must be equally long.
        rows: dict[int, list[tuple[int, ...]]] = {}
        for held, kind in kinds.items():
            for piece in slices.disjoint(held):
                number = numbers.get(piece.name)
                if number is not None:
                    rows.setdefault(len(piece.start), []).append((number, kind, *piece.start, *piece.shape))
        parts = [_padded(np.array(found, np.int64), dims, num_dims) for dims, found in sorted(rows.items())]
        table = np.concatenate([np.zeros((0, 2 + 2 * num_dims), np.int64), *parts])
        first, size = table[:, 2 : 2 + num_dims], table[:, 2 + num_dims :]
        table = table[(size > 0).all(1)]
        table = table[np.lexsort((*table.T[:0:-1], table[:, 0]))]
        first, size = table[:, 2 : 2 + num_dims], table[:, 2 + num_dims :]
        return cls(
            kind_of=np.array(kind_of, np.int64),
            tensor_B=table[:, 0],
            kind_B=table[:, 1],
            first_BD=first,
            end_BD=first + size,
        )

    def members(self) -> list[Integers]:
        """The ranks of each kind."""
        order = np.argsort(self.kind_of, kind="stable")
        bounds = np.searchsorted(self.kind_of[order], np.arange(int(self.kind_of.max(initial=-1)) + 1))
        return np.split(order, bounds[1:]) if len(bounds) else []

    def by_tensor(self, num_tensors: int) -> list[tuple[slice, bytes]]:
        """The rows of each tensor, with a key that is equal for tensors split alike among the same kinds."""
        rows = np.concatenate([self.kind_B[:, None], self.first_BD, self.end_BD], axis=1)
        bounds = np.searchsorted(self.tensor_B, np.arange(num_tensors + 1)).tolist()
        return [(slice(a, b), rows[a:b].tobytes()) for a, b in itertools.pairwise(bounds)]


def _padded(rows: Integers, dims: int, num_dims: int) -> Integers:
    """Rows of (tensor, kind, start, size) with dims added in front, of one element each."""
    lacking = num_dims - dims
    zeros, ones = np.zeros((len(rows), lacking), np.int64), np.ones((len(rows), lacking), np.int64)
    return np.concatenate([rows[:, :2], zeros, rows[:, 2 : 2 + dims], ones, rows[:, 2 + dims :]], axis=1)


@attrs.frozen(kw_only=True, eq=False)
class Chunks:
    """Disjoint chunks within each wanted shard.

    Attributes:
        wanted_C: The wanted shard in which the chunk lies.
        holders_C: Which set of holders it has, a number of `holders`.
        holders: Sets of kinds of sources, each in ascending order.
        is_covered: Whether the chunks of every wanted shard make it up.
    """

    wanted_C: Integers
    holders_C: Integers
    first_CD: Integers
    end_CD: Integers
    holders: Sequence[Integers]
    is_covered: bool


def chunks(kind_S: Integers, first_SD: Integers, end_SD: Integers, first_TD: Integers, end_TD: Integers) -> Chunks:
    """Cut the wanted shards (T) along the edges of what sources hold (S, of a kind each); an end is the index after."""
    shards, owner_S = np.unique(np.concatenate([first_SD, end_SD], axis=1), axis=0, return_inverse=True)
    owner_S = owner_S.reshape(-1)
    num_dims = first_SD.shape[1]
    first_BD, end_BD = shards[:, :num_dims], shards[:, num_dims:]
    holders_B = [np.unique(kind_S[owner_S == shard]) for shard in range(len(shards))]
    if len(_overlapping(first_BD, end_BD, first_BD, end_BD)[0]) == len(shards):
        wanted_C, shard_C = _overlapping(first_TD, end_TD, first_BD, end_BD)
        first_CD = np.maximum(first_TD[wanted_C], first_BD[shard_C])
        end_CD = np.minimum(end_TD[wanted_C], end_BD[shard_C])
        holders, holders_C = holders_B, shard_C
    else:
        wanted_C, first_CD, end_CD, held_CB = _grid(first_TD, end_TD, first_BD, end_BD)
        patterns, holders_C = np.unique(held_CB, axis=0, return_inverse=True)
        holders_C = holders_C.reshape(-1)
        holders = [np.unique(np.concatenate([holders_B[shard] for shard in np.flatnonzero(row)])) for row in patterns]
    found = np.bincount(wanted_C, (end_CD - first_CD).prod(1), minlength=len(first_TD))
    return Chunks(
        wanted_C=wanted_C,
        holders_C=holders_C,
        first_CD=first_CD,
        end_CD=end_CD,
        holders=holders,
        is_covered=bool((found == (end_TD - first_TD).prod(1)).all()),
    )


def _overlapping(
    first_TD: Integers, end_TD: Integers, first_BD: Integers, end_BD: Integers
) -> tuple[Integers, Integers]:
    """Pairs of a wanted shard and a held one that have an element in common."""
    common = (np.minimum(end_TD[:, None], end_BD) > np.maximum(first_TD[:, None], first_BD)).all(2)
    wanted, shard = np.nonzero(common)
    return wanted, shard


def _grid(
    first_TD: Integers, end_TD: Integers, first_BD: Integers, end_BD: Integers
) -> tuple[Integers, Integers, Integers, npt.NDArray[np.bool_]]:
    """Chunks of the grid of all edges within each wanted shard, and their holders; chunks that none holds go."""
    wanted, firsts, ends, helds = [], [], [], []
    for index, (first_D, end_D) in enumerate(zip(first_TD, end_TD, strict=True)):
        lows, highs = [], []
        for dim in range(len(first_D)):
            edges = np.concatenate([first_BD[:, dim], end_BD[:, dim], [first_D[dim], end_D[dim]]])
            edges = np.unique(edges.clip(first_D[dim], end_D[dim]))
            lows.append(edges[:-1])
            highs.append(edges[1:])
        low_CD = np.stack([axis.reshape(-1) for axis in np.meshgrid(*lows, indexing="ij")], axis=1)
        high_CD = np.stack([axis.reshape(-1) for axis in np.meshgrid(*highs, indexing="ij")], axis=1)
        held: npt.NDArray[np.bool_] = np.all((first_BD <= low_CD[:, None]) & (high_CD[:, None] <= end_BD), axis=2)
        kept = np.any(held, axis=1)
        wanted.append(np.full(int(kept.sum()), index))
        firsts.append(low_CD[kept])
        ends.append(high_CD[kept])
        helds.append(held[kept])
    return np.concatenate(wanted), np.concatenate(firsts), np.concatenate(ends), np.concatenate(helds)


@attrs.frozen(kw_only=True, eq=False)
class Lacking:
    """The chunks that ranks of one kind lack.

    Attributes:
        pattern_C: Pattern of each chunk: it stands for this chunk of every tensor of the pattern.
        set_C: Its holders, a place in `sets_S`.
        origin_C: Number in its pattern of the chunk that it was, before chunks were divided.
        sets_S: Numbers of the holder sets.
        nbytes_S: Bytes to get from each, over all tensors.
    """

    pattern_C: Integers
    set_C: Integers
    origin_C: Integers
    first_CD: Integers
    size_CD: Integers
    sets_S: Integers
    nbytes_S: Integers


class Patterns:
    """The chunks of every kind of target.

    Attributes:
        tensors: Numbers of the tensors of each pattern.
        holders: Holder sets: the sources that hold the same, by number, ascending.
        kinds: What each kind of target lacks.
        uncovered: The first tensor of which no source holds something that is wanted; then the rest is not to be used.
    """

    def __init__(self, held: Table, wanted: Table, itemsize: Sequence[int], grain_bytes: int) -> None:
        self.tensors: Final[list[Integers]] = []
        self.holders: Final[list[Integers]] = []
        self.kinds: Final[list[Lacking]] = []
        self.uncovered: int | None = None
        self._sources: Final = held.members()
        self._set_numbers: Final[dict[bytes, int]] = {}
        found: list[list[Integers]] = []
        for tensors, ours, theirs in _alike(held, wanted, itemsize):
            if not len(held.tensor_B[ours]):
                self._note(tensors[0])
                continue
            kind_S, first_TD, end_TD = held.kind_B[ours], wanted.first_BD[theirs], wanted.end_BD[theirs]
            cut = chunks(kind_S, held.first_BD[ours], held.end_BD[ours], first_TD, end_TD)
            if not cut.is_covered:
                self._note(tensors[0])
            found.append(self._take(tensors, cut, wanted.kind_B[theirs], itemsize[tensors[0]], grain_bytes))
        if self.uncovered is None:
            self._sort(found, len(wanted.members()), wanted.first_BD.shape[1])

    def _note(self, tensor: int) -> None:
        self.uncovered = tensor if self.uncovered is None else min(self.uncovered, tensor)

    def _take(
        self, tensors: Sequence[int], cut: Chunks, kind_T: Integers, itemsize: int, grain_bytes: int
    ) -> list[Integers]:
        """The chunks of one pattern: kind, pattern, holder set, origin, bytes of all tensors, first index, size."""
        pattern = len(self.tensors)
        self.tensors.append(np.array(tensors, np.int64))
        sets = np.array([self._set_of(kinds) for kinds in cut.holders], np.int64)
        first_CD, size_CD = cut.first_CD, cut.end_CD - cut.first_CD
        is_shared = np.array([len(self.holders[number]) > 1 for number in sets], bool)[cut.holders_C]
        origin, first_CD, size_CD = _divisible(first_CD, size_CD, is_shared, max(1, grain_bytes // itemsize))
        nbytes_C = size_CD.prod(1) * itemsize * len(tensors)
        kind_C, set_C = kind_T[cut.wanted_C][origin], sets[cut.holders_C][origin]
        return [kind_C, np.full(len(kind_C), pattern), set_C, origin, nbytes_C, first_CD, size_CD]

    def _set_of(self, kinds: Integers) -> int:
        """The number of the set of all sources of some kinds."""
        number = self._set_numbers.setdefault(kinds.tobytes(), len(self.holders))
        if number == len(self.holders):
            self.holders.append(np.sort(np.concatenate([self._sources[kind] for kind in kinds])))
        return number

    def _sort(self, found: Sequence[Sequence[Integers]], num_kinds: int, num_dims: int) -> None:
        """Sort the chunks of all patterns by kind of target."""
        flat, shard = np.zeros(0, np.int64), np.zeros((0, num_dims), np.int64)
        columns = zip((flat, flat, flat, flat, flat, shard, shard), *found, strict=True)
        kind_C, pattern_C, set_C, origin_C, nbytes_C, first_CD, size_CD = (np.concatenate(parts) for parts in columns)
        order = np.argsort(kind_C, kind="stable")
        bounds = np.searchsorted(kind_C[order], np.arange(1, num_kinds))
        for rows in np.split(order, bounds) if num_kinds else ():
            sets_S, place_C = np.unique(set_C[rows], return_inverse=True)
            nbytes_S = np.zeros(len(sets_S), np.int64)
            np.add.at(nbytes_S, place_C, nbytes_C[rows])
            self.kinds.append(
                Lacking(
                    pattern_C=pattern_C[rows],
                    set_C=place_C,
                    origin_C=origin_C[rows],
                    first_CD=first_CD[rows],
                    size_CD=size_CD[rows],
                    sets_S=sets_S,
                    nbytes_S=nbytes_S,
                )
            )


def _alike(held: Table, wanted: Table, itemsize: Sequence[int]) -> list[tuple[list[int], slice, slice]]:
    """Tensors of one pattern, in ascending order, with the rows of the first in both tables; unwanted ones left out."""
    found: dict[tuple[bytes, bytes, int], tuple[list[int], slice, slice]] = {}
    ours, theirs = held.by_tensor(len(itemsize)), wanted.by_tensor(len(itemsize))
    for tensor, ((mine, holding), (yours, lacking)) in enumerate(zip(ours, theirs, strict=True)):
        if lacking:
            found.setdefault((holding, lacking, itemsize[tensor]), ([], mine, yours))[0].append(tensor)
    return list(found.values())


def _divisible(
    first_CD: Integers, size_CD: Integers, is_shared: npt.NDArray[np.bool_], grain: int
) -> tuple[Integers, Integers, Integers]:
    """Split chunks that several sources hold until a row has at most `grain` elements.

    Returns the chunk that each part comes from; first indices; sizes.
    """
    origin = np.arange(len(first_CD))
    for dim in range(first_CD.shape[1] - 1):
        inner = size_CD[:, dim + 1 :].prod(1)
        counts = np.where(is_shared[origin] & (inner > grain), size_CD[:, dim], 1)
        if (counts == 1).all():
            continue
        parts = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(parts)) - np.repeat(np.cumsum(counts) - counts, counts)
        first_CD, size_CD = first_CD[parts].copy(), size_CD[parts].copy()
        first_CD[:, dim] += offset
        size_CD[counts[parts] > 1, dim] = 1
        origin = origin[parts]
    return origin, first_CD, size_CD
