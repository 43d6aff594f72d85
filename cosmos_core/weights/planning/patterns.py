"""What each kind of target lacks, as cells with their holders; tensors of one pattern share them.

A pattern is a way in which tensors are split among the same kinds of sources and targets: the experts of a layer that
lie on one rank, or a projection of every layer of a pipeline stage. C: cells; D: dims; S: holder sets of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.weights.planning.cells import Cells, cells
from cosmos_core.weights.planning.tables import Integers, Table


@attrs.frozen(kw_only=True, eq=False)
class Lacking:
    """What ranks of one kind lack.

    Attributes:
        pattern_C: Pattern of each cell: it stands for this cell of every tensor of the pattern.
        set_C: Its holders, a place in `sets_S`.
        origin_C: Number in its pattern of the cell that it was, before cells were divided.
        first_CD: First index.
        size_CD: Elements in each dim.
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
    """The cells of every kind of target.

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
            cut = cells(kind_S, held.first_BD[ours], held.end_BD[ours], first_TD, end_TD)
            if not cut.is_covered:
                self._note(tensors[0])
            found.append(self._take(tensors, cut, wanted.kind_B[theirs], itemsize[tensors[0]], grain_bytes))
        if self.uncovered is None:
            self._sort(found, len(wanted.members()), wanted.first_BD.shape[1])

    def _note(self, tensor: int) -> None:
        self.uncovered = tensor if self.uncovered is None else min(self.uncovered, tensor)

    def _take(
        self, tensors: Sequence[int], cut: Cells, kind_T: Integers, itemsize: int, grain_bytes: int
    ) -> list[Integers]:
        """The cells of one pattern: kind, pattern, holder set, origin, bytes of all tensors, first index, size."""
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
        """By kind of target, from the cells of all patterns."""
        flat, box = np.zeros(0, np.int64), np.zeros((0, num_dims), np.int64)
        columns = zip((flat, flat, flat, flat, flat, box, box), *found, strict=True)
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
    """Split cells that several sources hold until a row has at most `grain` elements.

    Returns:
        Of which cell each part is; first indices; sizes.
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
