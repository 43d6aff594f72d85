"""Which sources give what a target lacks: the nearest that hold it, each its part.

A demand is what all targets want from the same senders; `balance` evens out the demands of the whole pool.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from cosmos_core.weights.planning.balance import shares
from cosmos_core.weights.planning.patterns import Patterns
from cosmos_core.weights.planning.tables import Integers


class Senders:
    """The senders of each demand, and the demands of each target.

    Attributes:
        of_demand: The sources of each demand, by number, ascending.
        reach: Of each demand, up to where each of its senders gives, in parts of the whole; the last is left out.
    """

    def __init__(self, patterns: Patterns, kind_of: Integers, far: npt.NDArray[np.int8]) -> None:
        """Choose and balance.

        Args:
            patterns: What the kinds of targets lack, and who holds it.
            kind_of: Kind of each target.
            far: Distance of each source from each target, of shape (sources, targets).
        """
        self.of_demand: Final[list[Integers]] = []
        self._numbers: Final[dict[bytes, int]] = {}
        self._by_target: Final[list[Integers]] = []
        nbytes: dict[int, float] = {}
        known: dict[tuple[int, bytes], Integers] = {}
        for target, kind in enumerate(kind_of.tolist()):
            lacking, column = patterns.kinds[kind], np.ascontiguousarray(far[:, target])
            key = (kind, column.tobytes())
            if key not in known:
                known[key] = self._nearest([patterns.holders[number] for number in lacking.sets_S], column)
            self._by_target.append(known[key])
            for demand, amount in zip(known[key].tolist(), lacking.nbytes_S.tolist(), strict=True):
                nbytes[demand] = nbytes.get(demand, 0.0) + amount
        # In an order that does not depend on that of the targets: even plans are many, and this chooses one.
        demands = [demand for _, demand in sorted(self._numbers.items())]
        amounts = np.array([nbytes[demand] for demand in demands], np.float64)
        parts = dict(zip(demands, shares([self.of_demand[demand] for demand in demands], amounts), strict=True))
        self.reach: Final = [parts[demand].cumsum()[:-1].clip(0, 1) for demand in range(len(demands))]

    def demands(self, target: int) -> Integers:
        """The demand of each holder set of the target's kind (`Lacking.sets_S`)."""
        return self._by_target[target]

    def _nearest(self, sets: list[Integers], far: npt.NDArray[np.int8]) -> Integers:
        """Of each of some holder sets, the demand of its nearest members."""
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
