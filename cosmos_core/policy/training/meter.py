"""Metrics of a step: sums and maxima on each replica, merged over the group, then averaged.

What travels between replicas is JSON, so that members need not have seen the same quantities.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import attrs
import torch


@attrs.define
class Meter:
    """Accumulates a step's quantities.

    Attributes:
        sums: Totals over decisions or replicas.
        counts: How many values each sum is of, where it is to be averaged.
        maxima: Largest values.
    """

    sums: dict[str, float] = attrs.field(factory=dict)
    counts: dict[str, int] = attrs.field(factory=dict)
    maxima: dict[str, float] = attrs.field(factory=dict)

    def add(self, name: str, total: float, count: int = 0) -> None:
        """Add to a sum; with a count, it is reported as a mean."""
        self.sums[name] = self.sums.get(name, 0.0) + total
        if count:
            self.counts[name] = self.counts.get(name, 0) + count

    def peak(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self.maxima[name] = max(self.maxima.get(name, value), value)

    def merge(self, other: Meter) -> None:
        """Take in another replica's quantities."""
        for name, total in other.sums.items():
            self.add(name, total, other.counts.get(name, 0))
        for name, value in other.maxima.items():
            self.peak(name, value)

    def report(self) -> dict[str, float]:
        """Means, sums and maxima by name."""
        means = {name: total / self.counts.get(name, 1) for name, total in self.sums.items()}
        return means | self.maxima

    def encode(self) -> bytes:
        """As JSON; not-a-number and infinities survive."""
        return json.dumps([self.sums, self.counts, self.maxima]).encode()

    @classmethod
    def merged(cls, encoded: Iterable[bytes]) -> Self:
        """Merge what `encode` made on each replica."""
        meter = cls()
        for data in encoded:
            meter.merge(Meter(*json.loads(data)))
        return meter


class Stopwatch:
    """Seconds spent in named parts of a step."""

    def __init__(self, device: torch.device) -> None:
        self._is_asynchronous = device.type == "cuda"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._is_asynchronous:
                torch.cuda.synchronize()
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
