"""The prompts of one stage, each in exactly one place.

A position is queued, in flight, finished or batched (kept here one by one), or consumed or dropped (kept as counts:
the journal has the rest). Positions from `next_position` on were never touched.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence

import attrs

from cosmos_core.control.machine.records import SampleCounts, StageTotals, count_dropped
from cosmos_core.transport.directives import GroupRef
from cosmos_core.types import Sample


@attrs.frozen(kw_only=True)
class LedgerMark:
    """A ledger at one moment, with what was live then by position only."""

    next_position: int
    live: tuple[tuple[int, int], ...]
    """Ranges, the first position of each, and the one after its last. One is kept for each checkpoint of the run."""
    num_held: int
    held_units: int
    consumed: int
    dropped: dict[str, int]
    samples: SampleCounts
    totals: StageTotals


@attrs.define(kw_only=True)
class Ledger:
    """Moves positions between their places; each method is one legal move."""

    next_position: int = 0
    queued: list[int] = attrs.field(factory=list)
    """A heap: what came back is given out again before anything new, lowest position first."""
    in_flight: dict[int, int] = attrs.field(factory=dict)
    """Position to the weight version that its replica had when it was leased: what it generates is no older."""
    finished: dict[int, GroupRef] = attrs.field(factory=dict)
    batched: dict[int, GroupRef] = attrs.field(factory=dict)
    consumed: int = 0
    dropped: dict[str, int] = attrs.field(factory=dict)
    samples: SampleCounts = attrs.field(factory=SampleCounts)
    totals: StageTotals = attrs.field(factory=StageTotals)

    @property
    def num_live(self) -> int:
        """Prompts that were given out and will be trained on unless something happens to them."""
        return len(self.in_flight) + len(self.finished) + len(self.batched)

    @property
    def num_dropped(self) -> int:
        """Prompts dropped for any reason."""
        return sum(self.dropped.values())

    @property
    def num_held(self) -> int:
        """Samples of finished and batched prompts."""
        return len(self._held())

    @property
    def held_units(self) -> int:
        """Generated units of these."""
        return _units(self._held())

    def next(self) -> int:
        """Take the next position out of the queue or the stream; the caller puts it somewhere."""
        if self.queued:
            return heapq.heappop(self.queued)
        self.next_position += 1
        return self.next_position - 1

    def lease(self, version: int) -> int:
        """Next position, to in flight."""
        position = self.next()
        self.in_flight[position] = version
        return position

    def finish(self, group: GroupRef) -> None:
        """In flight to finished."""
        del self.in_flight[group.position]
        self.finished[group.position] = group
        self.samples.generated += len(group.samples)
        self.samples.units += _units(group.samples)

    def batch(self, positions: Iterable[int]) -> None:
        """Finished to batched."""
        for position in positions:
            self.batched[position] = self.finished.pop(position)

    def release(self, position: int) -> None:
        """Claimed back to finished."""
        self.finished[position] = self.batched.pop(position)

    def requeue(self, position: int) -> GroupRef | None:
        """Anything live back to the queue; its samples, if it had any, are lost."""
        group = self._take(position, "lost")
        heapq.heappush(self.queued, position)
        return group

    def drop(self, position: int, reason: str) -> GroupRef | None:
        """Anything live to dropped, with all its samples."""
        count_dropped(self.dropped, reason, 1)
        return self._take(position, reason)

    def consume(self, position: int) -> GroupRef:
        """Claimed to consumed; its unscored samples are counted as dropped by their status."""
        group = self.batched.pop(position)
        self.consumed += 1
        for sample in group.samples:
            if sample.is_scored:
                self.samples.consumed += 1
            else:
                self.samples.drop(sample.status, 1, sample.num_units)
        return group

    def mark(self) -> LedgerMark:
        """Remember this moment."""
        return LedgerMark(
            next_position=self.next_position,
            live=_ranges(sorted((*self.queued, *self.in_flight, *self.finished, *self.batched))),
            num_held=self.num_held,
            held_units=self.held_units,
            consumed=self.consumed,
            dropped=dict(self.dropped),
            samples=self.samples.copy(),
            totals=self.totals.copy(),
        )

    def rolled_back(self, mark: LedgerMark) -> Ledger:
        """The ledger of a marked moment, whose samples since then are counted as dropped."""
        fresh = Ledger.restore(mark, "rolled-back")
        undone = self.samples.generated - fresh.samples.generated
        units = self.samples.units - fresh.samples.units
        fresh.samples.generated += undone
        fresh.samples.units += units
        fresh.samples.drop("rolled-back", undone, units)
        return fresh

    @classmethod
    def restore(cls, mark: LedgerMark, reason: str = "lost") -> Ledger:
        """The ledger of a marked moment, with everything that was live queued again, its samples dropped."""
        samples = mark.samples.copy()
        samples.drop(reason, mark.num_held, mark.held_units)
        return cls(
            next_position=mark.next_position,
            queued=[position for first, end in mark.live for position in range(first, end)],
            consumed=mark.consumed,
            dropped=dict(mark.dropped),
            samples=samples,
            totals=mark.totals.copy(),
        )

    def _held(self) -> list[Sample]:
        groups = (*self.finished.values(), *self.batched.values())
        return [sample for group in groups for sample in group.samples]

    def _take(self, position: int, reason: str) -> GroupRef | None:
        if self.in_flight.pop(position, None) is not None:
            return None
        group = self.finished.pop(position, None) or self.batched.pop(position)
        self.samples.drop(reason, len(group.samples), _units(group.samples))
        return group


def _units(samples: Iterable[Sample]) -> int:
    """Generated units of samples."""
    return sum(sample.num_units for sample in samples)


def _ranges(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending positions as ranges."""
    # What follows each other is as far from its place as the one before.
    runs = itertools.groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0])
    spans = ([position for _, position in run] for _, run in runs)
    return tuple((span[0], span[-1] + 1) for span in spans)
