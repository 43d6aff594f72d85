"""Measures how near sources are to a rank, and arranges replicas in a tree in which each reads from a near one."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from cosmos_core.errors import WeightSyncError

DISTANCES: Final = ("process", "host", "rack", "anywhere")
"""What two ranks have in common, nearest first; a distance is a place in this list."""


@attrs.frozen(kw_only=True)
class Place:
    """Labels of where a rank runs. Equal labels mean the same place; an empty one is not known, and equals none.

    Attributes:
        process: Unique over all hosts.
        host: Unique over all racks.
        rack: Or the switch, or whatever has a faster network inside than outside.
    """

    process: str = ""
    host: str = ""
    rack: str = ""


def distances(sources: Sequence[Place], targets: Sequence[Place]) -> npt.NDArray[np.int8]:
    """The distance of each source from each target: places in `DISTANCES`, of shape (sources, targets)."""
    far = np.full((len(sources), len(targets)), DISTANCES.index("anywhere"), np.int8)
    for distance, label in reversed(list(enumerate(DISTANCES[:-1]))):
        codes: dict[str, int] = {}
        ours = [_code(codes, getattr(place, label), -1) for place in sources]
        theirs = [_code(codes, getattr(place, label), -2) for place in targets]
        far[np.equal.outer(np.array(ours, np.int64), np.array(theirs, np.int64))] = distance
    return far


def _code(codes: dict[str, int], label: str, unknown: int) -> int:
    return codes.setdefault(label, len(codes)) if label else unknown


ORIGIN: Final = -1
"""Stands for those who have the version to begin with."""


def parents(replicas: Sequence[Place], origin: Place, fan_out: int) -> list[int]:
    """The replica from which each one reads, or `ORIGIN`. Takes time in proportion to n log n.

    Only host and rack count, as no two are one process. Each replica, and the origin, has at most `fan_out` readers.
    """
    if fan_out < 1:
        raise WeightSyncError(f"a fan-out of {fan_out}: somebody must be allowed to read; give 1 or more")
    deepest = least_depth(len(replicas), fan_out)
    free = _Free(fan_out)
    if deepest:
        free.add(ORIGIN, origin, 0)
    found = [ORIGIN] * len(replicas)
    for replica, is_first in _order(replicas):
        place = replicas[replica]
        parent = free.shallowest(place) if is_first else free.nearest(place)
        found[replica] = parent
        depth = free.give(parent) + 1
        if depth < deepest:
            free.add(replica, place, depth)
    return found


class _Free:
    """The replicas that can have more readers, ordered by their depth, then by how many readers they have."""

    def __init__(self, fan_out: int) -> None:
        self._fan_out: Final = fan_out
        self._readers: Final[Counter[int]] = Counter()
        self._depths: Final[dict[int, int]] = {}
        self._places: Final[dict[int, Place]] = {}
        self._heaps: Final[defaultdict[tuple[str, str], list[tuple[int, int, int]]]] = defaultdict(list)
        """By label. An entry with another number of readers than its source has is out of date."""

    def add(self, source: int, place: Place, depth: int) -> None:
        """Add a replica that others can read from."""
        self._depths[source], self._places[source] = depth, place
        self._note(source)

    def give(self, source: int) -> int:
        """Count one more reader of a source, and return the source's depth."""
        self._readers[source] += 1
        if self._readers[source] < self._fan_out:
            self._note(source)
        return self._depths[source]

    def shallowest(self, reader: Place) -> int:
        """The nearest of the replicas at the least depth."""
        tops = [top for label in _labels(reader) if (top := self._top(label)) is not None]
        return min(tops, key=lambda top: top[0])[2]

    def nearest(self, reader: Place) -> int:
        """The one of least depth among the nearest replicas."""
        return next(top[2] for label in _labels(reader) if (top := self._top(label)) is not None)

    def _note(self, source: int) -> None:
        for label in _labels(self._places[source]):
            heapq.heappush(self._heaps[label], (self._depths[source], self._readers[source], source))

    def _top(self, label: tuple[str, str]) -> tuple[int, int, int] | None:
        heap = self._heaps[label]
        while heap and heap[0][1] != self._readers[heap[0][2]]:
            heapq.heappop(heap)
        return heap[0] if heap else None


def _labels(place: Place) -> Iterator[tuple[str, str]]:
    """Yield the labels of a place, from the nearest on; those that are not known are left out."""
    if place.host:
        yield "host", place.host
    if place.rack:
        yield "rack", place.rack
    yield "", ""


def least_depth(number: int, fan_out: int) -> int:
    """Levels that `number` replicas need below the origin."""
    depth, level, room = 0, 1, 0
    while room < number:
        depth, level = depth + 1, level * fan_out
        room += level
    return depth


def _order(replicas: Sequence[Place]) -> list[tuple[int, bool]]:
    """Order replicas, with which is first on its host: all of these, racks taking turns; then the second of each."""
    hosts: dict[tuple[str, str], int] = {}
    hosts_of_rack: Counter[str] = Counter()
    on_host: Counter[tuple[str, str]] = Counter()
    keys = []
    for index, place in enumerate(replicas):
        # Of what is not known nothing is shared.
        host = (place.rack, place.host or f"{index} alone")
        if host not in hosts:
            hosts[host] = hosts_of_rack[place.rack]
            hosts_of_rack[place.rack] += 1
        keys.append((on_host[host], hosts[host], index))
        on_host[host] += 1
    return [(index, turn == 0) for turn, _, index in sorted(keys)]
