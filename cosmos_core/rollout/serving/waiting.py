"""Samples that wait for a seat: lower priorities first, then those of earlier requests, then those of lower index."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from typing import Generic

from cosmos_core.rollout.serving.flight import S


class Waiting(Generic[S]):
    """The samples that wait, in the order in which they enter."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, S]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, samples: Iterable[S]) -> None:
        """Let samples wait; one that was set back keeps its place among the others."""
        for sample in samples:
            flight = sample.flight
            heapq.heappush(self._heap, (flight.request.priority, flight.number, sample.index, sample))

    def first(self) -> S:
        """Whose turn it is; there must be one."""
        return self._heap[0][3]

    def take(self) -> S:
        """Take out whose turn it is; there must be one."""
        return heapq.heappop(self._heap)[3]

    def remove(self, gone: Collection[S]) -> None:
        """Take out those of `gone` that wait."""
        self._heap = [entry for entry in self._heap if entry[3] not in gone]
        heapq.heapify(self._heap)
