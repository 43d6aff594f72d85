"""How much each sender gives of what several could give: no load can be evened out further.

A demand is an amount that any of some senders can give, in any parts. The shares minimise the sum of the squares of all
loads, hence make the loads lexicographically least: whoever gives a part of a demand has no more to send than anybody
else who could have given it, up to the tolerance. The largest load is then the least possible.

Method: coordinate descent over demands; each step pours one demand over its senders as water finds its level. The
sum of squares is smooth and convex, and demands constrain nothing in common, so that this converges to the minimum.
Senders of exactly the same demands are one with a multiplicity, so that they get exactly the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

TOLERANCE: Final = 0.005
"""Descent ends when no two senders of a demand differ by more than this part of the larger load."""
_MOST_STEPS: Final = 20_000
"""Bounds the time; a few thousand are enough even for long chains of overlapping demands."""

Indices: TypeAlias = npt.NDArray[np.int64]
Amounts: TypeAlias = npt.NDArray[np.float64]


def shares(senders: Sequence[Indices], demands: Amounts) -> list[Amounts]:
    """The part of each demand that each of its senders gives.

    Args:
        senders: Of each demand, the senders that can give it; at least one, none twice.
        demands: The amounts, above zero.

    Returns:
        Of each demand, fractions that add up to 1, in the order of `senders`.
    """
    alike = _alike(senders)
    pools = [_Pool.of(alike[members], float(amount)) for members, amount in zip(senders, demands, strict=True)]
    loads = np.zeros(int(alike.max(initial=-1)) + 1)
    for pool in pools:
        if len(pool.groups) == 1:
            pool.give(loads)
    # Who has little choice first: where the sets are nested, one round is then enough.
    _descend(sorted((pool for pool in pools if len(pool.groups) > 1), key=lambda pool: pool.counts.sum()), loads)
    return [
        (pool.given / pool.amount)[np.searchsorted(pool.groups, alike[members])]
        for pool, members in zip(pools, senders, strict=True)
    ]


@attrs.define(kw_only=True, eq=False)
class _Pool:
    """A demand, and what each of its senders gives; senders that are alike are one group."""

    amount: float
    groups: Indices
    counts: Amounts
    given: Amounts

    @classmethod
    def of(cls, groups: Indices, amount: float) -> Self:
        found, counts = np.unique(groups, return_counts=True)
        return cls(amount=amount, groups=found, counts=counts.astype(np.float64), given=np.zeros(len(found)))

    def is_even(self, loads: Amounts) -> bool:
        """Whether nobody who gives has more to send than another that could."""
        mine, giving = loads[self.groups], self.given > 0
        if not giving.any():
            return False
        most = mine[giving].max()
        return bool(most - mine.min() <= TOLERANCE * most)

    def give(self, loads: Amounts) -> None:
        """Choose anew who gives how much, so that their loads become even."""
        base = loads[self.groups] - self.given
        self.given = _pour(base, self.counts, self.amount)
        loads[self.groups] = base + self.given


def _alike(senders: Sequence[Indices]) -> Indices:
    """A number for each sender, equal for those of the same demands; -1 for those of none."""
    if not senders:
        return np.zeros(0, np.int64)
    members = np.concatenate(senders)
    demand = np.repeat(np.arange(len(senders)), [len(each) for each in senders])
    order = np.argsort(members, kind="stable")
    members, demand = members[order], demand[order]
    found, first = np.unique(members, return_index=True)
    numbers: dict[bytes, int] = {}
    alike = np.full(int(members.max()) + 1, -1, np.int64)
    for sender, mine in zip(found, np.split(demand, first[1:]), strict=True):
        alike[sender] = numbers.setdefault(mine.tobytes(), len(numbers))
    return alike


def _descend(pools: Sequence[_Pool], loads: Amounts) -> None:
    steps = 0
    is_even = not pools
    while not is_even and steps < _MOST_STEPS:
        is_even = True
        for pool in pools:
            is_even &= pool.is_even(loads)
            pool.give(loads)
        steps += len(pools)


def _pour(base: Amounts, counts: Amounts, amount: float) -> Amounts:
    """What lifts the lowest of `base`, each of which stands for some of `counts`, to one level, `amount` in all."""
    order = np.argsort(base, kind="stable")
    heights, widths = base[order], np.cumsum(counts[order])
    filled = np.cumsum(counts[order] * heights)
    levels = (amount + filled) / widths
    # The first level that does not reach the next height is the one.
    reach = int(np.argmax(levels <= np.append(heights[1:], np.inf)))
    poured: Amounts = np.maximum(levels[reach] - base, 0.0)
    if not poured.any():  # so little that the level does not show it
        poured = (base == heights[0]).astype(np.float64)
    return poured * (amount / float((poured * counts).sum()))
