"""Samples that wait for a seat: lower priorities first, then those of earlier requests, then those of lower index."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable

from cosmos_core.rollout.serving.sequence import Sequence


class Waiting:
    """The samples that wait, in the order in which they enter."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Let samples wait; one that was set back keeps its place among the others."""
        for sequence in sequences:
            flight = sequence.flight
            heapq.heappush(self._heap, (flight.request.priority, flight.number, sequence.index, sequence))

    def first(self) -> Sequence:
        """Whose turn it is; there must be one."""
        return self._heap[0][3]

    def take(self) -> Sequence:
        """Take out whose turn it is; there must be one."""
        return heapq.heappop(self._heap)[3]

    def remove(self, gone: Collection[Sequence]) -> None:
        """Take out those of `gone` that wait."""
        self._heap = [entry for entry in self._heap if entry[3] not in gone]
        heapq.heapify(self._heap)
