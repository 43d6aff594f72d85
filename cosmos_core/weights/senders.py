"""Chooses the sources that send what a target lacks: the nearest that hold it, each a part, so that loads are even.

A demand is what all targets want from the same senders. Demands are assigned greedily to whoever has the least to send,
which is within 10 % of the mean load wherever the topology allows that. M: transfers; D: dims; B: borders between two
senders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.weights.partition import Integers, Patterns

Amounts: TypeAlias = npt.NDArray[np.float64]
_ROUNDS: Final = 8
"""Demands are assigned one after another, so many times: each time they know better what the others load."""


def shares(senders: Sequence[Integers], demands: Amounts) -> list[Amounts]:
    """The part of each demand that each of its senders gives: greedily, to whoever has the least to send so far.

    Each demand, above zero, has at least one sender, none twice. Its fractions, in their order, add up to 1.
    """
    loads = np.zeros(1 + max((int(members.max()) for members in senders), default=-1))
    given = [np.zeros(len(members)) for members in senders]
    # Demands with little choice first: where the sets are nested, one round is then enough.
    order = sorted(range(len(senders)), key=lambda number: len(senders[number]))
    for _ in range(_ROUNDS):
        for number in order:
            base = loads[senders[number]] - given[number]
            given[number] = _pour(base, float(demands[number]))
            loads[senders[number]] = base + given[number]
    return [amounts / demand for amounts, demand in zip(given, demands.tolist(), strict=True)]


def _pour(base: Amounts, amount: float) -> Amounts:
    """Parts of an amount that lift the lowest loads to one level."""
    heights = np.sort(base)
    levels = (amount + np.cumsum(heights)) / np.arange(1, len(base) + 1)
    # The first level that does not reach the next height is the one.
    reach = int(np.argmax(levels <= np.append(heights[1:], np.inf)))
    poured: Amounts = np.maximum(levels[reach] - base, 0.0)
    if not poured.any():  # so little that the level does not show it
        poured = (base == heights[0]).astype(np.float64)
    scaled: Amounts = poured * (amount / poured.sum())
    return scaled


class Senders:
    """The senders of each demand, and the demands of each target.

    Attributes:
        demands: The demand of each holder set, for each target, of the target's kind (`Lacking.sets_S`).
        of_demand: The sources of each demand, by number, ascending.
        reach: The end of each sender's part of each demand, in parts of the whole; the last is left out.
    """

    def __init__(self, patterns: Patterns, kind_of: Integers, far: npt.NDArray[np.int8]) -> None:
        """Choose and balance; `far` is the distance of each source from each target, of shape (sources, targets)."""
        self.of_demand: Final[list[Integers]] = []
        self._numbers: Final[dict[bytes, int]] = {}
        self.demands: Final[list[Integers]] = []
        nbytes: dict[int, float] = {}
        known: dict[tuple[int, bytes], Integers] = {}
        for target, kind in enumerate(kind_of.tolist()):
            lacking, column = patterns.kinds[kind], np.ascontiguousarray(far[:, target])
            key = (kind, column.tobytes())
            if key not in known:
                known[key] = self._nearest([patterns.holders[number] for number in lacking.sets_S], column)
            self.demands.append(known[key])
            for demand, amount in zip(known[key].tolist(), lacking.nbytes_S.tolist(), strict=True):
                nbytes[demand] = nbytes.get(demand, 0.0) + amount
        # In an order that does not depend on that of the targets: even plans are many, and this chooses one.
        demands = [demand for _, demand in sorted(self._numbers.items())]
        amounts = np.array([nbytes[demand] for demand in demands], np.float64)
        parts = dict(zip(demands, shares([self.of_demand[demand] for demand in demands], amounts), strict=True))
        self.reach: Final = [parts[demand].cumsum()[:-1].clip(0, 1) for demand in range(len(demands))]

    def _nearest(self, sets: list[Integers], far: npt.NDArray[np.int8]) -> Integers:
        """Find, for each of some holder sets, the demand of its nearest members."""
        if not sets:
            return np.zeros(0, np.int64)
        counts = np.array([len(members) for members in sets])
        members, offsets = np.concatenate(sets), np.cumsum(counts) - counts
        distance = far[members]
        nearest = distance == np.repeat(np.minimum.reduceat(distance, offsets), counts)
        ends = zip(offsets.tolist(), (offsets + counts).tolist(), strict=True)
        return np.array([self._number(members[a:b][nearest[a:b]]) for a, b in ends], np.int64)

    def _number(self, senders: Integers) -> int:
        number = self._numbers.setdefault(senders.tobytes(), len(self.of_demand))
        if number == len(self.of_demand):
            self.of_demand.append(senders)
        return number


@attrs.frozen(kw_only=True, eq=False)
class Transfers:
    """The transfers to one target.

    Attributes:
        source_M: Number of the source in `Plan.sources`.
        tensor_M: Number of the tensor in `Plan.names`.
        origin_M: Number of the chunk of which it is a part: a source holds that in one piece, two of them perhaps not.
    """

    source_M: Integers
    tensor_M: Integers
    origin_M: Integers
    first_MD: Integers
    size_MD: Integers
    nbytes_M: Integers


def divide(whole: Transfers, senders: Sequence[Integers], reach: Sequence[Amounts], grain_bytes: int) -> Transfers:
    """Give each sender of a demand its part: one run of rows, in the order of the transfers.

    A border is off by no more than half a grain, or half a row where that is larger. Neighbours of one chunk that have
    the same sender become one transfer.

    Args:
        whole: Transfers in the order of their demands, whose places in `senders` stand for the sources.
        senders: The sources of each demand; every demand has transfers.
        reach: Of each demand, up to where each of its senders but the last gives, in parts of the demand, ascending.
        grain_bytes: Transfers are cut at multiples of about this many bytes.
    """
    counts = np.array([len(each) for each in senders], np.int64)
    if (counts <= 1).all():
        members = np.concatenate([np.zeros(0, np.int64), *senders])
        return _merged(attrs.evolve(whole, source_M=members[whole.source_M]))
    dim_M = (whole.size_MD > 1).argmax(1)  # the outermost of more than one element is the one to cut
    rows_M = np.take_along_axis(whole.size_MD, dim_M[:, None], 1)[:, 0]
    row_bytes_M = whole.nbytes_M // rows_M
    begin_M = np.cumsum(whole.nbytes_M) - whole.nbytes_M
    index_B, cut_B = _borders(whole, begin_M, row_bytes_M, reach, grain_bytes)
    cut_B = np.minimum(cut_B, rows_M[index_B])
    index, row, until = _parts(rows_M, index_B, cut_B)
    # Borders count over all demands; those of the demands before lie at the begin of this one, or earlier.
    border_B, begin = begin_M[index_B] + cut_B * row_bytes_M[index_B], begin_M[index] + row * row_bytes_M[index]
    place = whole.source_M[index]
    border = np.searchsorted(border_B, begin, side="right") - (np.cumsum(counts - 1) - (counts - 1))[place]
    first, size, dim = whole.first_MD[index], whole.size_MD[index], dim_M[index][:, None]
    np.put_along_axis(first, dim, np.take_along_axis(first, dim, 1) + row[:, None], 1)
    np.put_along_axis(size, dim, (until - row)[:, None], 1)
    divided = Transfers(
        source_M=np.concatenate(senders)[(np.cumsum(counts) - counts)[place] + border],
        tensor_M=whole.tensor_M[index],
        origin_M=whole.origin_M[index],
        first_MD=first,
        size_MD=size,
        nbytes_M=(until - row) * row_bytes_M[index],
    )
    return _merged(divided)


def _merged(found: Transfers) -> Transfers:
    """Transfers that follow one another and make up a shard of one chunk, from one source, as one."""
    for dim in reversed(range(found.size_MD.shape[1])):
        is_new = np.ones(len(found.source_M), bool)
        first_MD, size_MD = found.first_MD, found.size_MD
        is_equal_MD = (np.diff(first_MD, axis=0) == 0) & (np.diff(size_MD, axis=0) == 0)
        is_equal_MD[:, dim] = first_MD[1:, dim] == first_MD[:-1, dim] + size_MD[:-1, dim]
        same = [np.diff(numbers) == 0 for numbers in (found.source_M, found.tensor_M, found.origin_M)]
        is_new[1:] = ~np.logical_and.reduce([is_equal_MD.all(1), *same])
        begin = np.flatnonzero(is_new)
        if len(begin) == len(is_new):
            continue
        size_MD = size_MD[begin]
        size_MD[:, dim] = np.add.reduceat(found.size_MD[:, dim], begin)
        found = Transfers(
            source_M=found.source_M[begin],
            tensor_M=found.tensor_M[begin],
            origin_M=found.origin_M[begin],
            first_MD=first_MD[begin],
            size_MD=size_MD,
            nbytes_M=np.add.reduceat(found.nbytes_M, begin),
        )
    return found


def _borders(
    whole: Transfers, begin_M: Integers, row_bytes_M: Integers, reach: Sequence[Amounts], grain_bytes: int
) -> tuple[Integers, Integers]:
    """Find the borders between senders: the transfer, and how many of its rows are before the border."""
    bounds = np.searchsorted(whole.source_M, np.arange(len(reach) + 1))
    ends = np.append(begin_M, begin_M[-1] + whole.nbytes_M[-1])[bounds]
    demand_B = np.repeat(np.arange(len(reach)), [len(each) for each in reach])
    at_B = ends[demand_B] + np.concatenate(reach) * (ends[demand_B + 1] - ends[demand_B])
    index_B = np.searchsorted(begin_M, at_B, side="right") - 1
    index_B = np.clip(index_B, bounds[demand_B], bounds[demand_B + 1] - 1)
    rows_a_grain = np.maximum(1, grain_bytes // row_bytes_M[index_B])
    grains = np.rint((at_B - begin_M[index_B]) / (row_bytes_M[index_B] * rows_a_grain))
    return index_B, grains.astype(np.int64) * rows_a_grain


def _parts(rows_M: Integers, index_B: Integers, cut_B: Integers) -> tuple[Integers, Integers, Integers]:
    """Transfers cut at the borders: which one, its first row, the row after its last."""
    is_inside = (cut_B > 0) & (cut_B < rows_M[index_B])
    index = np.concatenate([np.arange(len(rows_M)), index_B[is_inside]])
    row = np.concatenate([np.zeros(len(rows_M), np.int64), cut_B[is_inside]])
    order = np.lexsort((row, index))
    index, row = index[order], row[order]
    is_new = np.append(True, (np.diff(index) > 0) | (np.diff(row) > 0))
    index, row = index[is_new], row[is_new]
    until = np.append(row[1:], 0)
    return index, row, np.where(until > 0, until, rows_M[index])
