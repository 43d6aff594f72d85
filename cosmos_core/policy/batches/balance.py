"""Sharing a step's sequences among the processes of a replica, so that each has about as many units."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(lengths: Sequence[int], shares: int) -> list[tuple[int, ...]]:
    """Indices of `lengths` for each share: longest first, each to the share with the fewest units so far.

    Deterministic, so that every process works it out for itself. The fullest share has at most one sequence more than
    the emptiest needs (Graham, 1969: within 4/3 of the best possible).
    """
    totals = [(0, share) for share in range(shares)]
    members: list[list[int]] = [[] for _ in range(shares)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, share = heapq.heappop(totals)
        members[share].append(index)
        heapq.heappush(totals, (total + lengths[index], share))
    return [tuple(sorted(indices)) for indices in members]
